"""What is learned from an episode, beside the plain reference of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.algorithms import plain_episodes as plain
from tests.algorithms.plain_episodes import Episode, Token, Trajectory
from tests.algorithms.support import loss_input
from verl.algorithms import make_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.rollout.turns import Outcome, Turns, episode_rows

STEP = 0.05


def check_learned(outcome: Outcome, tokenizer: Any, trained: Sequence[str], reward: float | None) -> None:
    """Advantages and loss of GRPO, of the episode among two others of its prompt, are those of the reference for an
    episode with this reward (None: it counts for nothing) whose trajectories trained these texts, in their order."""
    others = [Outcome(0, [Turns([7] * size, [1] * size, [-1.0] * size, reward=float(size))]) for size in (2, 3)]
    prompts = Batch.from_columns({"id": ["p/0", "p/1", "p/2"], "group": ["p"] * 3, "prompt_tokens": [[1]] * 3})
    rows = episode_rows(prompts, [outcome, *others], version=0, is_double=True)
    rows = rows.add({"reward": rows["episode_reward"]})
    algorithm = make_algorithm("grpo")
    prepared = algorithm.prepare(rows)[0]

    numbers = iter(range(10_000))
    sizes = [*((("p/0", reward), len(tokenizer(text)["input_ids"])) for text in trained)]
    sizes += [(("p/1", 2.0), 2), (("p/2", 3.0), 3)]
    episodes: dict[str, Episode] = {"p/0": Episode("p/0", "p", reward)}
    for (id_, number), size in sizes:
        tokens = [Token(next(numbers), True, old=0.0, new=STEP) for _ in range(size)]
        episodes.setdefault(id_, Episode(id_, "p", number)).trajectories.append(Trajectory(tokens))
    expected = plain.advantages("grpo", [*episodes.values()])
    is_trained = Responses(prepared).trained
    assert prepared.tensor("advantages")[is_trained].tolist() == pytest.approx([*expected.values()], abs=1e-12)
    log_probs = prepared.tensor("old_log_probs").double() + STEP
    loss = algorithm.compute_loss(loss_input(algorithm, prepared, log_probs=torch.as_tensor(log_probs)))
    assert float(loss.total) == pytest.approx(plain.loss("grpo", "token-mean", [*episodes.values()]), abs=1e-12)
