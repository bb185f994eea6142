"""Three steps of a script for each of several layouts of training and of generation, one after the other in one job.

python layouts.py MODEL OUT CASES, the last as JSON: name -> [settings of training, of generation, placement]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cluster.three_steps import run, save

if __name__ == "__main__":
    for name, (train, rollout, placement) in json.loads(sys.argv[3]).items():
        save(run(sys.argv[1], placement, train, rollout=rollout), Path(sys.argv[2]) / name)
