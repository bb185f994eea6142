"""Two steps of asynchronous training with a reward worker, in one process or under torchrun: MODEL, file of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import verl
from verl.batch import Batch
from verl.rollout.base import SamplingParams
from verl.trainer.asynchronous import AsyncTrainer


def low_bytes(texts: list[str]) -> list[float]:
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]


def prompts() -> Iterator[Batch]:
    for n in range(100):
        yield Batch.from_columns({"prompt": [f"Say {n}", f"Answer {n}"], "group": [f"a{n}", f"b{n}"]})


if __name__ == "__main__":
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    actor = verl.Actor(sys.argv[1], optim={"lr": 1e-2}, sampling=params)
    reward = verl.Reward(low_bytes, workers=1)
    trainer = AsyncTrainer(
        actor, reward_fn=reward, algorithm="grpo", log_dir=False, n=2, batch_size=2, max_staleness=0, deadline=200
    )
    batches = prompts()
    records = [trainer.advance(batches) for _ in range(2)]
    weights = {shard.name: float(shard.tensor.double().sum()) for shard in actor.shards()}
    trainer.close()
    kept = {"weights": weights, "rewards": [record["reward/mean"] for record in records]}
    Path(sys.argv[2]).write_text(json.dumps({**kept, "version": actor.policy_version}))
    print("done")
