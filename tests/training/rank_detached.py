"""Updates by a loss without a gradient, whose rows one of two ranks has alone. Prints each rank's error by case.

The argument is "fsdp" or "zero".
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.training.rank_zero_advantage import Case, Zero
from tests.training.test_zero_advantage import Detached
from tests.training.zero_advantage_steps import prepared_steps
from verl.errors import TrainingError
from verl.training.ranks import gather_json
from verl.weights.layout import Layout
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates

CASES = {"fsdp": [Case("llama", Layout(shard=2))], "zero": [Zero(stage) for stage in (1, 2, 3)]}


def refusal(case: Any, group: Any) -> str:
    (batch,) = prepared_steps("grpo", [(False, True)], rejected=False)[1]
    engine = case.engine(group)
    try:
        run_updates(engine, [TaskLoss(batch, Detached().objective("actor"))], MiniBatchPlan(), 0)
    except TrainingError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    everyone = dist.new_group([0, 1])
    for one_case in CASES[sys.argv[1]]:
        refused = gather_json(refusal(one_case, everyone), everyone)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"case": str(one_case), "refused": refused}) + "\n")
    dist.destroy_process_group()
