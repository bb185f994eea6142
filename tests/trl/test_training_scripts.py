"""TRL's own training scripts, of its installed release, run with their import line changed, and end where TRL's do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".bench" / "trl"


@pytest.mark.timeout(1600)
@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl")
def test_training_scripts_of_trl(tmp_path: Path) -> None:
    (site,) = PEER.glob("lib/python3*/site-packages")
    command = [sys.executable, ROOT / "scripts" / "trl_scripts.py", site, "--only", "trl/scripts/", "--keep", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0 and done.stdout.count("trl/scripts/") == 6, done.stdout + done.stderr[-2000:]
