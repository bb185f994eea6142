"""The model outputs that an algorithm needs for its samples: one list for graphs, updaters and actors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.roles.actor import Actor
    from verl.roles.critic import Critic

#: Role of a value model -> the column of its values.
VALUES = {"critic": "values", "cost_critic": "cost_values"}


class ModelOutput(NamedTuple):
    """A column, the role whose model computes it, and how: from sequences to a batch of this column alone."""

    column: str
    role: str
    compute: Callable[[Batch], Batch]


def model_outputs(algorithm: BaseAlgorithm, actor: Actor, critics: Mapping[str, Critic]) -> list[ModelOutput]:
    """Reference log-probs and values, as the algorithm's roles say; `critics` by role."""
    columns = [ModelOutput(VALUES[role], role, _values(critic, VALUES[role])) for role, critic in critics.items()]
    if "reference" in algorithm.roles:
        columns.insert(0, ModelOutput("ref_log_probs", "reference", actor.compute_ref_log_probs))
    return columns


def with_model_outputs(algorithm: BaseAlgorithm, sequences: Batch, wanted: Iterable[ModelOutput]) -> Batch:
    """The sequences with rows that the algorithm adds, and with the columns that they lack."""
    sequences = algorithm.extend(sequences)
    for read in wanted:
        if read.column not in sequences:
            sequences = sequences.add(read.compute(sequences))
    return sequences


def prepare(
    algorithm: BaseAlgorithm, actor: Actor, samples: Batch, together: int | None = None
) -> tuple[Batch, dict[str, float]]:
    """Compute the log-probs before the update if needed, then call `BaseAlgorithm.prepare`. The log-probs are null in
    rows that the update is already known to leave out; if it leaves out all rows, there is no such column.

    Args:
        together: samples of the whole update, where it has others besides.

    Raises:
        DataError: the algorithm's `prepare` gave a column of the samples other values.
    """
    if "log_probs" not in samples and actor.needs_old_log_probs(algorithm, samples, together):
        # The rows that the update may compute, as far as is known before `algorithm.prepare`.
        decides = algorithm.objective("actor").loss_needs.advantages_decide and not algorithm.needs_log_probs
        needed = algorithm.needs(samples, "actor") if actor.plan.skip_zero_advantage_rows and decides else None
        rows = [row for row in range(len(samples)) if needed is None or needed[row]]
        if len(rows) == len(samples):
            samples = samples.add(actor.compute_log_probs(samples))
        elif rows:
            samples = samples.add(actor.compute_log_probs(samples.take(rows)).among(rows, len(samples)))
    prepared, metrics = algorithm.prepare(samples)
    if changed := prepared.changed(samples):
        raise DataError(
            f"algorithm '{algorithm.name}': its prepare returned other values of column '{changed[0]}', which the "
            "samples have: columns are added, never overwritten. Return them under a name that the samples lack, such "
            f"as '{algorithm.name}_{changed[0]}', and read that (in a loss: name it in loss_columns)"
        )
    return prepared, metrics


def _values(critic: Critic, column: str) -> Callable[[Batch], Batch]:
    return lambda batch: Batch.from_columns({column: critic.compute_values(batch).arrow("values")})
