"""Compiled kernels for CPU: built from the C++ files of this folder by the machine's own compiler at first use.

The library is kept in the user's cache directory, by the hash of source, command and processor. Without a compiler,
or on another device or dtype, torch code computes the same.

It is linked without an OpenMP runtime of its own and finds the one that torch has loaded: two runtimes would
mean two pools of threads on the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
_BUILD_SECONDS = 120
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
#: Sizes that the elementwise kernels take are multiples of this.
VECTOR = 16


class _Data:
    """The type of an argument that is a tensor, of which the kernel gets the address, or None."""

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(_pointer(tensor))


_TYPES: dict[str, Any] = {"t": _Data, "i": ctypes.c_int64, "d": ctypes.c_double, "f": ctypes.c_float}
#: The arguments of the elementwise kernels, by the letters of their types. The number of threads comes after them.
_ARGUMENTS = {
    "linear": "ttttiii",
    "rms_norm": "ttttiid",
    "rms_norm_backward": "ttttttiid",
    "rotate": "tttiiii",
    "silu_mul": "ttti",
    "silu_mul_backward": "ttttti",
    "gather": "tttiiii",
    "scatter": "tttiiiii",
    "scatter_add": "tttiiii",
    "softmax_rows": "ttiifttt",
    "softmax_rows_backward": "ttiiftttt",
}


class _Scores(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "gradients", "before")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "length", "keys", "own", "first", "window")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class Kernels:
    """The kernels for one dtype. Tensors given to the elementwise ones are contiguous and of that dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = _SUFFIXES[dtype]
        self.attend: Callable[..., Any] = library[f"verl_attend_{suffix}"]
        self.choose: Callable[..., Any] = library[f"verl_choose_{suffix}"]
        self.elementwise = dtype != torch.float64
        self._functions: dict[str, Callable[..., Any]] = {}
        if self.elementwise:
            #: See rollout/fused.py.
            self.forward: Callable[..., Any] = library[f"verl_forward_{suffix}"]
            self._softmax = library[f"verl_softmax_{suffix}"]
            self._softmax_backward = library[f"verl_softmax_backward_{suffix}"]
            for name, letters in _ARGUMENTS.items():
                self._functions[name] = function = library[f"verl_{name}_{suffix}"]
                function.argtypes = [*map(_TYPES.__getitem__, letters), ctypes.c_int]

    def run(self, name: str, *arguments: Tensor | float | None) -> None:
        """Call one of the elementwise kernels."""
        self._functions[name](*arguments, torch.get_num_threads())

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """`x += delta`, then `out = weight * x / rms(x)`; `[T, d]`, weight `[d]`."""
        self.run("rms_norm", x, delta, weight, out, *x.shape, eps)

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, grad: Tensor, to_x: Tensor, to_weight: Tensor, out: Tensor
    ) -> None:
        """For the gradient `grad` of the norm's output: `to_x` and `to_weight` (`[d]`, fp32) grow by the gradients of
        input and weight, and `out` becomes the norm's output again."""
        self.run("rms_norm_backward", x, weight, grad, to_x, out, to_weight, *x.shape, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place: `x` `[T, H, D]`, halves rotated against each other; cos, sin `[T, R]`, R <= D."""
        self.run("rotate", x, cos, sin, *x.shape, cos.shape[1])

    def silu_mul(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """`out = silu(gate) * up`; `out` may be `gate`."""
        self.run("silu_mul", gate, up, out, gate.numel())

    def silu_mul_backward(self, gate: Tensor, up: Tensor, grad: Tensor, to_gate: Tensor, to_up: Tensor) -> None:
        """For the gradient `grad` of the output: those of `gate` and `up`; `grad` becomes the output again."""
        self.run("silu_mul_backward", gate, up, grad, to_gate, to_up, gate.numel())

    def softmax_rows(
        self, logits: Tensor, targets: Tensor, alpha: float, log_probs: Tensor, norms: Tensor, entropies: Tensor | None
    ) -> None:
        """Of softmax(alpha * logits), `[N, V]`: log-probs of targets `[N]`, logs of the sums, entropies; all fp32."""
        self.run("softmax_rows", logits, targets, *logits.shape, alpha, log_probs, norms, entropies)

    def softmax_rows_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        alpha: float,
        norms: Tensor,
        entropies: Tensor | None,
        to_log_probs: Tensor,
        to_entropies: Tensor | None,
    ) -> None:
        """`logits` become their gradient, given those of log-probs and entropies `[N]`."""
        given = (norms, entropies, to_log_probs, to_entropies)
        self.run("softmax_rows_backward", logits, targets, *logits.shape, alpha, *given)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """`[B, H, L, D]`: the heads of `x` `[T, H, D]` at `index` `[B, L]`; zeros where that is -1."""
        (rows, length), (_, heads, size) = index.shape, x.shape
        out = x.new_empty((rows, heads, length, size))
        self.run("gather", x, index, out, rows, length, heads, size)
        return out

    def scatter(self, x: Tensor, index: Tensor, out: Tensor, start: int) -> None:
        """`out` `[T, H, D]` at `index[:, start : start + L]` becomes `x` `[B, H, L, D]`; no index stands twice."""
        rows, heads, length, size = x.shape
        self.run("scatter", x, index[:, start:], out, rows, length, index.shape[1], heads, size)

    def scatter_add(self, x: Tensor, index: Tensor, total: Tensor) -> None:
        """`total` `[T, H, D]`, fp32, grows at `index` `[B, L]` by `x` `[B, H, L, D]`, row after row."""
        rows, heads, length, size = x.shape
        self.run("scatter_add", x, index, total, rows, length, heads, size)

    def softmax(
        self, scores: Tensor, before: Tensor, own: int, first: int, window: int, scale: float, gradients: Tensor | None
    ) -> None:
        """`scores` `[B, H, L, M]` become probabilities, and `gradients` of probabilities, if given, those of scores.

        Query i, the `first + i`-th of its row b, sees the keys up to `before[b]` and those from `own` up to its own
        place; of these the last `window`.
        """
        pointers = (scores.data_ptr(), _pointer(gradients), before.data_ptr())
        call = _Scores(*pointers, *scores.shape, own, first, window, scale, torch.get_num_threads())
        (self._softmax if gradients is None else self._softmax_backward)(ctypes.byref(call))


def accumulate(total: Tensor, x: Tensor, scale: float, add: bool) -> None:
    """`total += scale * x`, or without `add` `total = scale * x`; of one shape."""
    compiled = library() if x.dtype == torch.bfloat16 and total.dtype == torch.float32 else None
    suits = x.device.type == "cpu" and x.numel() % VECTOR == 0 and x.is_contiguous() and total.is_contiguous()
    if compiled is None or not suits:
        total.add_(x, alpha=scale) if add else total.copy_(x).mul_(scale)
        return
    count, factor = ctypes.c_int64(x.numel()), ctypes.c_float(scale)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (total, x))
    compiled.verl_accumulate_bf16(*pointers, count, factor, int(add), torch.get_num_threads())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` without a gradient: x `[T, K]`, weight `[N, K]`, bias `[N]`; into `out` `[T, N]` if given.

    Where the kernel is (CPU, bf16 and fp32), a row's result is the same bit for bit beside any other rows.
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(rows, columns)
    compiled = kernels(x.dtype, x.device)
    tensors = (x, weight, out) if bias is None else (x, weight, out, bias)
    suits = inner % VECTOR == 0 and columns % 4 == 0 and rows > 0
    if suits and compiled is not None and compiled.elementwise and all(_is_plain(t, x.dtype) for t in tensors):
        compiled.run("linear", x, weight, bias, out, rows, inner, columns)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
    return out


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_contiguous() and tensor.dtype == dtype


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=8)
def kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for this dtype on this device, or None where there are none."""
    if device.type != "cpu" or dtype not in _SUFFIXES:
        return None
    compiled = library()
    return None if compiled is None else Kernels(compiled, dtype)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be built."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        logger.warning("no C++ compiler here: work on CPU takes the slower torch code")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or error
        logger.warning("the kernels for CPU cannot be compiled, slower torch code is used: %s", detail)
        return None


def _build(compiler: str) -> Path:
    texts = [path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]*"))]
    key = hashlib.sha256(repr((texts, compiler, _FLAGS, platform.machine(), _processor())).encode())
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl"
    target = directory / f"kernels-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        sources = {path: Path(scratch) / f"{path.stem}.o" for path in sorted(_FOLDER.glob("*.cpp"))}
        linked = Path(scratch) / "kernels.so"
        run = partial(subprocess.run, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = ([compiler, *_FLAGS, "-c", str(path), "-o", str(item)] for path, item in sources.items())
            list(pool.map(run, commands))
        run([compiler, "-shared", *map(str, sources.values()), "-o", str(linked)])
        # Another process may have built the same meanwhile: the rename is atomic.
        os.replace(linked, target)
    return target


def _processor() -> str:
    """What `-march=native` depends on: a cache directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
