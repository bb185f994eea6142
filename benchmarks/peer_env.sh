#!/usr/bin/env bash
# Make the isolated environment of a peer under .bench/NAME, from pinned versions, if it is not there.
#   benchmarks/peer_env.sh trl        prints the path of the environment's Python as its last line
#   benchmarks/peer_env.sh agents     what agents are written with, for tests/rollout/test_gateway_agents.py and test_gateway_clients.py
#   benchmarks/peer_env.sh preload    Intel's OpenMP and tcmalloc: prints what LD_PRELOAD takes (Debian and its kin)
# PYTHON chooses the interpreter, TORCH_ARGS is passed to pip where it installs torch.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=torch==2.13.0
case ${1-} in
    trl) packages=(trl==1.16.0 accelerate==1.15.0 datasets==5.2.0) ;;
    agents)
        torch=
        packages=(
            openai==3.57.0 anthropic==2.13.0 openai-agents==0.24.0 'pydantic-ai-slim[openai,anthropic]==2.68.0'
            langgraph==1.2.24 langchain-openai==1.7.4 smolagents==1.26.0 litellm==1.110.2
        ) ;;
    preload)
        env=.bench/preload
        if [[ ! -e $env/.installed ]]; then
            rm -rf "$env"
            "${PYTHON:-python3}" -m venv "$env"
            "$env/bin/python" -m pip install --quiet intel-openmp==2024.2.1 >&2
            (cd "$env" && apt-get download --quiet libtcmalloc-minimal4 >&2 && dpkg -x libtcmalloc-minimal4_*.deb deb)
            touch "$env/.installed"
        fi
        echo "$PWD/$env/lib/libiomp5.so:$(ls "$PWD/$env"/deb/usr/lib/*/libtcmalloc_minimal.so.4)"
        exit ;;
    *) echo "usage: $0 trl|agents|preload" >&2; exit 2 ;;
esac

env=.bench/$1
if [[ ! -e $env/.installed ]]; then
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    if [[ $torch ]]; then
        # shellcheck disable=SC2086  # TORCH_ARGS is a list of words
        "$env/bin/python" -m pip install --quiet --constraint constraints.txt ${TORCH_ARGS-} "$torch" >&2
        "$env/bin/python" -m pip install --quiet --constraint constraints.txt "$torch" "${packages[@]}" >&2
    else # it meets this project over a socket, and has pins of its own
        "$env/bin/python" -m pip install --quiet "${packages[@]}" >&2
    fi
    touch "$env/.installed"
fi
echo "$PWD/$env/bin/python"
