"""Packages of agents, which the project's own environment lacks; `benchmarks/peer_env.sh agents` makes one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("VERL_AGENTS_PYTHON", ROOT / ".bench" / "agents" / "bin" / "python"))


def folder() -> Path | None:
    """Where that environment has its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = PYTHON.parent.parent / "lib" / version / "site-packages"
    return packages if packages.is_dir() else None


@contextmanager
def openai_package() -> Iterator[None]:
    """`import openai` works, with this environment's packages for all else that both have; or the test is skipped."""
    extra = folder()
    if extra is not None:
        sys.path.append(str(extra))
    try:
        pytest.importorskip("openai", reason="`benchmarks/peer_env.sh agents` makes the environment")
        yield
    finally:
        if extra is not None:
            sys.path.remove(str(extra))
