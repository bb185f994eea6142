"""An observer on one of several ranks: OBSERVER SETTINGS INPUT FILE. What rank 0 sees goes into the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.config import observed
from tests.roles.rank_cells import make_exact
from verl.config import load_config

if __name__ == "__main__":
    torch.set_num_threads(1)
    make_exact()
    name, settings, number, file = sys.argv[1:]
    with observed.counted() as calls:
        seen = getattr(observed, name)(load_config(settings), int(number))
    if os.environ.get("RANK", "0") == "0":
        torch.save({"numbers": seen.numbers, "ended": seen.ended, "calls": dict(calls)}, Path(file))
