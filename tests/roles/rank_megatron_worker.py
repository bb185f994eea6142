"""Two GRPO steps of an actor under Megatron-LM's layers, or, without sizes, of one process; what it learned.

python rank_megatron_worker.py MODEL OUT [MEGATRON_CONFIG as JSON]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import verl
from tests.exact import ExactRMSNorm


def reward(responses: list[str]) -> list[float]:
    return [sum(map(ord, text)) % 7 / 7 for text in responses]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Qwen2RMSNorm.forward = ExactRMSNorm.forward  # type: ignore[assignment, method-assign]
    model, out, *config = sys.argv[1:]
    settings: dict[str, Any] = {
        "sampling": verl.SamplingParams(max_new_tokens=8),
        "dtype": "float64",
        "optim": {"lr": 1e-2},
    }
    if config:
        actor: Any = verl.MegatronWorker(model_name=model, megatron_config=json.loads(config[0]), **settings)
    else:
        actor = verl.Actor(model, **settings)
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False)
    records = [trainer.step(["Once upon a time", "A", "And"]) for _ in range(2)]
    metrics = [{name: record[name] for name in ("loss", "grad_norm", "reward") if name in record} for record in records]
    torch.save({"metrics": metrics, "weights": {s.name: s.tensor.clone() for s in actor.shards()}}, out)
