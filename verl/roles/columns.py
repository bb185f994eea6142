"""Joining the results of calls to their sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verl.batch import Batch
from verl.errors import DataError, shown
from verl.rewards.scores import is_usable


def expand(prompts: Batch, n: int, greedy_baseline: bool = False) -> Batch:
    """One row a sample to be drawn: `n` for each prompt, with `greedy_baseline` also a greedy one (`baseline` true)."""
    numbers: Sequence[int | str] = [*range(n), *(["greedy"] if greedy_baseline else [])]
    rows = prompts.take([row for row in range(len(prompts)) for _ in numbers])
    ids = [f"{group}/{number}" for group in prompts["group"] for number in numbers]
    columns: dict[str, Any] = {"id": ids}
    if greedy_baseline:
        columns["baseline"] = [number == "greedy" for _ in range(len(prompts)) for number in numbers]
    return rows.drop(["id"]).add(columns)


def as_sequences(sequences: Any) -> Batch:
    """Check that sequences are a `Batch`, and return them.

    Raises:
        DataError: they are not.
    """
    if not isinstance(sequences, Batch):
        raise DataError(f"sequences are a Batch of generate_sequences, not a {type(sequences).__name__}")
    return sequences


def as_responses(responses: Any) -> Batch:
    """Responses as a batch to score: texts become column `response`, (prompt, response) pairs also `prompt`.

    Raises:
        DataError: it is something else.
    """
    if isinstance(responses, Batch):
        return responses
    rows: list[Any] = list(responses) if isinstance(responses, Sequence) and not isinstance(responses, str) else [None]
    pairs = [("", row) if isinstance(row, str) else row for row in rows]
    if not all(isinstance(pair, tuple | list) and [*map(type, pair)] == [str, str] for pair in pairs):
        raise DataError(
            "a reward scores sequences of generate_sequences, a list of texts, or a list of (prompt, response) pairs, "
            f"not {shown(responses)}"
        )
    return Batch.from_rows([{"prompt": prompt, "response": response} for prompt, response in pairs])


def aligned(sequences: Batch, values: Any, name: str) -> Batch:
    """`sequences` with the column `name` from `values`: a `Batch` of the same rows, or a list or tensor of one
    item a row.

    Raises:
        DataError: the rows are not the same, or the sequences have other numbers there already.
    """
    if isinstance(values, Batch):
        if name not in values:
            raise DataError(f"the {name} given have no column '{name}': their columns are {sorted(values.columns)}")
        if name in sequences and values.arrow(name) != sequences.arrow(name):
            raise DataError(f"column '{name}' is there already, with other numbers: sequences.drop(['{name}']) first")
        if "id" in values and "id" in sequences and values["id"] != sequences["id"]:
            raise DataError(f"the {name} belong to other samples than the sequences: pass them in the same order")
        return sequences.add(values)
    return sequences.add({name: values})


def add_rewards(sequences: Batch, rewards: Any) -> Batch:
    """`sequences` with `reward` (and its components). Numbers that are not finite in float32 abstain.

    Raises:
        DataError: sequences are no batch, or rewards no numbers.
    """
    sequences = as_sequences(sequences)
    if isinstance(rewards, Batch):
        return aligned(sequences, rewards, "reward")
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        raise DataError(
            f"rewards are what get_reward gives, or a list or tensor of {len(sequences)} numbers, not {shown(rewards)}"
        )
    return aligned(sequences, [_number(reward, row) for row, reward in enumerate(rewards)], "reward")


def temperature_of(sequences: Any, usual: float) -> float:
    """The sampling temperature of sequences: `usual` in rows that name none.

    Raises:
        DataError: their rows have several, or they are no batch.
    """
    rows = as_sequences(sequences)
    temperatures = {usual if one is None else one for one in rows["temperature"]} if "temperature" in rows else {usual}
    if len(temperatures) > 1:
        raise DataError(f"samples were drawn at temperatures {sorted(temperatures)}: give those of one at a time")
    return temperatures.pop() if temperatures else usual


def _number(reward: Any, row: int) -> float | None:
    try:
        number = math.nan if reward is None else float(reward)
    except (TypeError, ValueError):
        raise DataError(f"the reward of row {row} is {shown(reward)}: give a number, or None to abstain") from None
    return number if is_usable(number) else None
