"""Compiles the C++ files of this folder with the machine's own compiler, once for each source, command and processor.

The library lies in the user's cache directory. It is linked without an OpenMP runtime of its own and uses the one that
torch has loaded: two runtimes would mean two pools of threads on the same cores.
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
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
#: What the kernels are compiled for, as `-march` takes it; the variable names an older processor ("x86-64-v2").
_ARCHITECTURE = os.environ.get("VERL_KERNELS_MARCH") or "native"
_FLAGS = ("-std=c++17", "-O3", f"-march={_ARCHITECTURE}", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
_BUILD_SECONDS = 120
_LOCK = threading.Lock()


def find_compiler() -> str | None:
    """The path of the C++ compiler that is used; None: none is here, or the system is not Linux."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    return compiler if sys.platform.startswith("linux") else None


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with a warning, where they cannot be built."""
    compiler = find_compiler()
    if compiler is None:
        logger.warning("no C++ compiler here: work on CPU takes the slower torch code")
        return None
    try:
        with _LOCK:  # a thread may build it ahead
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
    logger.info("compiling the kernels for CPU, once for this machine")
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
