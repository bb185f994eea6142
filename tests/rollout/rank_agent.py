"""Three steps that train an agent behind the gateway; started by the tests in one process and in several.

python rank_agent.py MODEL OUT [TRAIN], the last as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch

import verl
from tests.cluster.three_steps import learned, save


def agent(base_url: str, api_key: str, row: Mapping[str, Any], between: Callable[[], None] | None = None) -> float:
    """Two turns, of which the second is asked for in two ways; something may be done before it."""
    said = ""
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:

        def ask(*chat: Any) -> Any:
            answer = client.post("/chat/completions", json={"model": "any", "messages": chat})
            return answer.raise_for_status().json()["choices"][0]["message"]

        first = {"role": "user", "content": row["prompt"]}
        reply = ask(first)
        if between is not None:
            between()
        for question in ("Sure?", "Why?"):
            said += str(ask(first, reply, {"role": "user", "content": question})["content"])
    return sum(map(ord, said)) % 7 / 7


def reward(completions: list[str], episode_reward: list[float], **columns: Any) -> list[float]:
    return episode_reward


def run(model: str, train: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    actor = verl.Actor(
        model,
        dtype="float64",
        optim={"lr": 1e-2},
        mini_batch_size=8,
        max_tokens_per_micro_batch=400,
        sampling=verl.SamplingParams(max_new_tokens=6),
        train=train,
        episode=verl.Gateway(agent, chat_template="hermes"),
    )
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False)
    records, samples = learned(trainer, ["Once upon a time", "In the beginning", "A"])
    return {"records": records, "samples": samples, "weights": {s.name: s.tensor.clone() for s in actor.shards()}}


if __name__ == "__main__":
    save(run(sys.argv[1], *map(json.loads, sys.argv[3:])), Path(sys.argv[2]))
