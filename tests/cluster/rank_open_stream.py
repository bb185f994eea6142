"""Calls that are called while a stream of a rollout by tensor parallelism is open; a job of 2 ranks.

python rank_open_stream.py MODEL; prints one line of JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import verl
from verl.errors import ClusterError
from verl.rollout.base import SamplingParams
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker


def refusal(call: Any) -> str:
    try:
        call()
    except ClusterError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sampling = verl.SamplingParams(max_new_tokens=12)
    actor = verl.Actor(sys.argv[1], dtype="float64", tensor_parallel_size=2, optim={"lr": 1e-2}, sampling=sampling)
    other = verl.Critic(sys.argv[1], dtype="float64", optim={"lr": 1e-2})
    rows = actor.generate_sequences(["Once upon a time", "In the beginning", "A"], temperature=0.0)
    prompts = rows.select(["id", "group", "prompt_tokens"])
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    found: dict[str, Any] = {}
    stream = actor.group.call(ActorWorker.generate, prompts, params)
    first = [next(stream)]
    found["refused"] = [
        refusal(lambda: actor.group.call(ActorWorker.log_probs, rows)),
        refusal(lambda: other.group.call(CriticWorker.values, rows)),
        refusal(lambda: next(actor.group.call(ActorWorker.generate, prompts, params))),
    ]
    found["rows"] = sum(map(len, [*first, *stream]))
    found["log_probs after it"] = len(actor.group.call(ActorWorker.log_probs, rows))
    stream = actor.group.call(ActorWorker.generate, prompts, params)
    next(stream)
    stream.close()
    found["log_probs after close"] = len(actor.group.call(ActorWorker.log_probs, rows))
    sys.stdout.write(json.dumps(found) + "\n")
