"""What ends or shapes an actor's responses: an episode, a guard, a grammar and stop strings, with greedy tokens. In one
process, or in a job of ranks that generate together.

python rank_controls.py MODEL RANKS; prints one line of JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import verl
from verl.rollout.base import SamplingParams, Verdict
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.episode import Client
from verl.rollout.grammar import Grammar
from verl.rollout.turns import Turns

PROMPTS = ["Once upon a time", "In the beginning", "A", "The quick brown fox"]
COLUMNS = ("response_tokens", "response", "finish", "rollout_log_probs", "response_mask", "rejected", "episode_error")


async def talk(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
    """Two turns at a time, with a tool's tokens between them; of the third prompt none."""
    if len(row["prompt_tokens"]) == 1:
        raise KeyError("no tool")
    turns = Turns()
    turns.wrote(await client.generate(row["prompt_tokens"], SamplingParams(max_new_tokens=5, temperature=0.0)))
    turns.read([70, 71, 72])
    prompt = [*row["prompt_tokens"], *turns.response_tokens]
    return [turns.wrote(await client.generate(prompt, SamplingParams(max_new_tokens=6, temperature=0.0)))]


class Aborts:
    """Refuses texts of more than six characters of some prompts."""

    every = 3

    def __call__(self, texts: Sequence[str]) -> list[Verdict]:
        return ["reject" if len(text) > 6 and ord(text[0]) % 2 else None for text in texts]


def main(model: str, ranks: int) -> dict[str, Any]:
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0)
    date = Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
    episodes = {
        "episode": talk,
        "guard": ConstrainedEpisode(guard=Aborts(), max_resamples=1),
        "grammar": ConstrainedEpisode(grammar=date, max_resamples=0),
        "stop": None,
    }
    options: dict[str, Any] = {"dtype": "float64", "tensor_parallel_size": ranks, "sampling": sampling}
    actors = {name: verl.Actor(model, episode=episode, **options) for name, episode in episodes.items()}
    free = actors["stop"].generate_sequences(PROMPTS)
    stops = tuple(sorted({text[3] for text in free["response"]})[:2])
    found = {}
    for name, actor in actors.items():
        rows = actor.generate_sequences(PROMPTS, key="k", **({"stop": stops} if name == "stop" else {}))
        found[name] = {column: list(rows[column]) for column in COLUMNS if column in rows}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]))) + "\n")
