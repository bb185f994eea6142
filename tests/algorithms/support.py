"""Small ragged batches, and micro-batches of them, for tests of algorithms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import LossInput, PolicyGradient, algorithm_names, make_algorithm
from verl.algorithms.base import BaseAlgorithm, RoleObjective
from verl.batch import Batch

#: Every algorithm of the package, so that a new one is tested by itself.
_BUILT_IN = [n for n in algorithm_names() if type(make_algorithm(n)).__module__.startswith("verl.")]
ONLINE = [name for name in _BUILT_IN if make_algorithm(name).online]
GRADIENT = [name for name in ONLINE if isinstance(make_algorithm(name), PolicyGradient)]
OFFLINE = [name for name in _BUILT_IN if not make_algorithm(name).online]


def experience(
    lengths: Sequence[int], groups: Sequence[str], rewards: Sequence[float | None], seed: int = 0, **columns: Any
) -> Batch:
    """Scored samples with every column that an algorithm may read, in fp64; about one token in six is a tool's."""
    rng = random.Random(seed)

    def ragged(low: float, high: float) -> tuple[Tensor, list[int]]:
        values = [rng.uniform(low, high) for _ in range(sum(lengths))]
        return torch.tensor(values, dtype=torch.float64), list(lengths)

    return Batch.from_columns(
        {
            "id": [f"{group}/{row}" for row, group in enumerate(groups)],
            "group": list(groups),
            "prompt_tokens": [[1]] * len(lengths),
            "response_tokens": [[7] * length for length in lengths],
            "response_mask": [[int(rng.random() > 0.17) for _ in range(length)] for length in lengths],
            "reward": list(rewards),
            "log_probs": ragged(-2, 0),
            "rollout_log_probs": ragged(-2, 0),
            "ref_log_probs": ragged(-2, 0),
            "values": ragged(-1, 1),
            "cost_values": ragged(-1, 1),
            "cost": [rng.uniform(-1, 1) for _ in lengths],
            **columns,
        }
    )


def preferences(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Pairs (two rows each, in random order within the pair) with labels and every model's log-probs."""
    rng = random.Random(seed)
    labels: list[float] = []
    for _ in range(len(lengths) // 2):
        labels += rng.choice([[1.0, 0.0], [0.0, 1.0]])
    groups = [f"p{row // 2}" for row in range(len(lengths))]
    tokens = [[7 + row % 2] * length for row, length in enumerate(lengths)]  # a pair's responses differ
    return experience(lengths, groups, [None] * len(lengths), seed, label=labels, response_tokens=tokens)


def random_experience(seed: int, with_baseline: bool = False) -> Batch:
    """Groups of one to four, empty responses, ties and rewards that abstained."""
    rng = random.Random(seed)
    groups = [f"g{g}" for g in range(4) for _ in range(rng.randint(1, 4))]
    rng.shuffle(groups)
    lengths = [rng.randint(0, 6) for _ in groups]
    rewards = [rng.choice([0.0, 1.0, 1.0, 0.3, None]) for _ in groups]
    rewards[0], lengths[0] = 1.0, 3
    if not with_baseline:
        return experience(lengths, groups, rewards, seed)
    names = sorted(set(groups))
    flags = [False] * len(groups) + [True] * len(names)
    return experience(lengths + [2] * len(names), groups + names, rewards + [0.5] * len(names), seed, baseline=flags)


def prepared(name: str, seed: int, **options: Any) -> tuple[BaseAlgorithm, Batch]:
    """An algorithm and a batch that its `prepare` made."""
    algorithm, batch = unprepared(name, seed, **options)
    return algorithm, algorithm.prepare(batch)[0]


def unprepared(name: str, seed: int, **options: Any) -> tuple[BaseAlgorithm, Batch]:
    """An algorithm and a batch for its `prepare`."""
    algorithm = make_algorithm(name, **options)
    if name in ONLINE:
        batch = random_experience(seed, algorithm.greedy_baseline)
    else:
        rng = random.Random(seed)
        batch = preferences([rng.randint(0, 5) for _ in range(8)], seed)
    if name == "kto":
        wide = algorithm.extend(batch.drop(["log_probs", "ref_log_probs"]))
        lengths = wide.lengths("response_tokens")
        torch.manual_seed(seed)
        batch = wide.add(
            {n: (torch.randn(sum(lengths), dtype=torch.float64), lengths) for n in ("log_probs", "ref_log_probs")}
        )
    return algorithm, batch


def loss_input(
    objective: BaseAlgorithm | RoleObjective, batch: Batch, rows: Sequence[int] | None = None, **outputs: Tensor
) -> LossInput:
    """The micro-batch of these rows of a mini-batch; `outputs` are for the whole mini-batch, `[R]` or `[S]`."""
    rows = range(len(batch)) if rows is None else rows
    lengths = batch.lengths("response_tokens")
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    tokens = torch.tensor([starts[row] + i for row in rows for i in range(lengths[row])], dtype=torch.int64)
    index = torch.tensor(list(rows), dtype=torch.int64)
    mask = batch.tensor("response_mask") != 0 if "response_mask" in batch else torch.ones(sum(lengths)) != 0

    def part(values: Tensor, by_row: bool) -> Tensor:
        return values.index_select(0, index if by_row else tokens)

    columns = {}
    is_role = isinstance(objective, RoleObjective)
    for name in objective.loss_needs.columns if is_role else objective.loss_columns:
        if name == "group":
            numbers = {group: i for i, group in enumerate(dict.fromkeys(batch["group"][row] for row in rows))}
            columns[name] = torch.tensor([numbers[batch["group"][row]] for row in rows])
        elif name in batch:
            columns[name] = part(batch.tensor(name), by_row=not hasattr(batch.arrow(name).type, "value_type"))
    return LossInput(
        **{name: part(values, by_row=name == "scores") for name, values in outputs.items()},
        weights=part(objective.token_weights(batch), by_row=False),
        mask=part(mask, by_row=False),
        sequence=torch.arange(len(rows)).repeat_interleave(torch.tensor([lengths[r] for r in rows], dtype=torch.int64)),
        num_sequences=len(rows),
        total_sequences=len(batch),
        total_tokens=int(mask.sum()),
        total_active=int(objective.token_weights(batch).count_nonzero()),
        total_groups=len(batch.group_indices()),
        columns=columns,
    )
