"""Whether torch.compile can work here: its back end, inductor, needs compilers that torch does not bring along."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

#: Kinds of devices for which inductor writes kernels -> the environment variable and names of the host's compiler.
_HOST_COMPILERS = {
    "cpu": ("CXX", ("g++", "clang++")),
    "cuda": ("CC", ("gcc", "clang", "cc")),
    "xpu": ("CXX", ("icpx", "g++", "clang++")),
}


def lacking(kind: str) -> str | None:
    """What torch.compile lacks for devices of a kind ("cuda"), as the end of a message; None: nothing."""
    if kind not in _HOST_COMPILERS:
        return f"torch.compile writes no kernels for '{kind}'"
    variable, names = _HOST_COMPILERS[kind]
    if kind != "cpu" and find_spec("triton") is None:
        return "torch.compile needs triton here: pip install triton"
    if not any(map(shutil.which, filter(None, (os.environ.get(variable), *names)))):
        return f"torch.compile needs a compiler of the host: install {names[0]} or set {variable}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python.h: install the headers of Python (python3-dev)"
    return None
