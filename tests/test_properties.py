"""Property tests with all of their examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(
    str(file.relative_to(TESTS)) for file in TESTS.rglob("test_*.py") if "\nfrom hypothesis " in file.read_text("utf-8")
)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_in_full(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis and not slow", "--hypothesis-profile", "full"]
    done = subprocess.run([*command, str(TESTS / file)], cwd=TESTS.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
