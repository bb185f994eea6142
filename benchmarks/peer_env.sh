#!/usr/bin/env bash
# Make the isolated environment of a peer under .bench/NAME, from pinned versions, if it is not there.
#   benchmarks/peer_env.sh trl        prints the path of the environment's Python as its last line
# PYTHON chooses the interpreter, TORCH_ARGS is passed to pip where it installs torch.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=torch==2.13.0
case ${1-} in
    trl) packages=(trl==1.16.0 accelerate==1.15.0 datasets==5.2.0) ;;
    *) echo "usage: $0 trl" >&2; exit 2 ;;
esac

env=.bench/$1
if [[ ! -e $env/.installed ]]; then
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    # shellcheck disable=SC2086  # TORCH_ARGS is a list of words
    "$env/bin/python" -m pip install --quiet --constraint constraints.txt ${TORCH_ARGS-} "$torch" >&2
    "$env/bin/python" -m pip install --quiet --constraint constraints.txt "$torch" "${packages[@]}" >&2
    touch "$env/.installed"
fi
echo "$PWD/$env/bin/python"
