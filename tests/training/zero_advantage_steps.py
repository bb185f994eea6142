"""Three updates of any algorithm, with rows whose gradient is 0 and without them, for tests that compare the two."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.algorithms.support import OFFLINE, ONLINE, experience
from verl.algorithms import BaseAlgorithm, PolicyGradient, make_algorithm
from verl.batch import Batch
from verl.training.engine import TrainEngine
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates

#: Samples of a prompt.
GROUP = 3
#: Of each step and prompt, whether its samples score alike.
STEPS = ((True, False, True, False), (True, True, True, True), (False, False, True, False))
KL, ENTROPY = {"kl_in": "loss", "kl_coef": 0.05}, {"entropy_coeff": 0.01}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    (name, options)
    for name in (*ONLINE, *OFFLINE)
    for options in ({}, KL, ENTROPY, KL | ENTROPY)
    if not options or isinstance(make_algorithm(name), PolicyGradient)
] + [("safe_rlhf", {"baseline": "critics"})]  # fmt: skip


class Stepped(NamedTuple):
    """What three updates came to: weights, and the metrics of each."""

    weights: dict[str, Tensor]
    metrics: list[dict[str, float]]


def scored(alike: Sequence[bool], seed: int, algorithm: BaseAlgorithm, rejected: bool = True) -> Batch:
    """Samples of several prompts, of which one may be `rejected` whole; pairs for algorithms that learn from
    recordings."""
    draw, samples = random.Random(seed), GROUP if algorithm.online else 2
    size = samples + algorithm.greedy_baseline
    rows = [(group, sample) for group in range(len(alike)) for sample in range(size)]
    lengths = [draw.randint(1, 6) for _ in rows]
    prompts = [[draw.randrange(37) for _ in range(2 + group)] for group in range(len(alike))]
    columns: dict[str, Any] = {
        "prompt_tokens": [prompts[group] for group, _ in rows],
        "response_tokens": [[draw.randrange(37) for _ in range(length)] for length in lengths],
    }
    if rejected:
        columns["loss_mask"] = [[int(row != 1)] * length for row, length in enumerate(lengths)]
    else:
        columns["response_mask"] = [[1] * length for length in lengths]
    if algorithm.greedy_baseline:
        columns["baseline"] = [sample == samples for _, sample in rows]
    if not algorithm.online:
        columns["label"] = [float(sample == 0) for _, sample in rows]
    # A reward that no binary number is: the mean of equal ones is not always the same number.
    rewards = [0.1 if alike[group] else draw.choice([0.0, 0.3, 1.0]) + 0.013 * sample**2 for group, sample in rows]
    costs = [0.7 if alike[group] else draw.random() for group, _ in rows]
    return experience(lengths, [f"g{group}" for group, _ in rows], rewards, seed, cost=costs, **columns)


def prepared_steps(
    name: str, steps: Sequence[Sequence[bool]] = STEPS, *, rejected: bool = True, **options: Any
) -> tuple[BaseAlgorithm, list[Batch]]:
    """The algorithm, and what it has prepared for each step."""
    algorithm = make_algorithm(name, **options)
    batches = []
    for step, alike in enumerate(steps):
        batch = scored(alike, step, algorithm, rejected)
        if name == "kto":
            wide = algorithm.extend(batch.drop(["log_probs", "ref_log_probs"]))
            lengths = wide.lengths("response_tokens")
            torch.manual_seed(step)
            new = {n: (torch.randn(sum(lengths), dtype=torch.float64), lengths) for n in ("log_probs", "ref_log_probs")}
            batch = wide.add(new)
        batches.append(algorithm.prepare(batch)[0])
    return algorithm, batches


def stepped(
    engine: TrainEngine,
    algorithms: Sequence[tuple[BaseAlgorithm, Sequence[Batch]]],
    *,
    role: str = "actor",
    skip: bool,
    whole: Callable[[TrainEngine], dict[str, Tensor]] | None = None,
    **plan: Any,
) -> Stepped:
    """Updates of a role on the steps of one algorithm, or of several at once."""
    metrics = []
    several = len(algorithms) > 1
    for step in range(len(algorithms[0][1])):
        parts = [
            TaskLoss(batches[step], algorithm.objective(role), weight=1.0 + number, name=f"task/{number}" * several)
            for number, (algorithm, batches) in enumerate(algorithms)
        ]
        metrics.append(run_updates(engine, parts, MiniBatchPlan(skip_zero_advantage_rows=skip, **plan), step))
    return Stepped((whole or weights_of)(engine), metrics)


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.detach().clone() for shard in engine.shards()}


def farthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
