"""Whether torch.compile can work here: its back end, inductor, needs compilers that torch does not bring along."""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

#: Kinds of devices for which inductor writes kernels.
_KINDS = ("cpu", "cuda", "xpu")


def lacking(kind: str) -> str | None:
    """What torch.compile lacks for devices of a kind ("cuda"), as the end of a message; None: nothing."""
    if kind not in _KINDS:
        return f"torch.compile writes no kernels for '{kind}'"
    if kind != "cpu" and find_spec("triton") is None:
        return "torch.compile needs triton here: pip install triton"
    from torch._inductor import cpp_builder, exc

    try:  # it wraps kernels for any device
        compiler = cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        compiler = None
    if not compiler:
        return "torch.compile needs a C++ compiler of the host: install one, or set CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python.h: install the headers of Python (python3-dev)"
    return None
