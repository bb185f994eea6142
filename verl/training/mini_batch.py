"""The record of a micro-batch (`LossInput`), cut out of what is known of the whole mini-batch."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verl._host.device import to_device
from verl.algorithms.loss_terms import Loss, LossInput, LossTerm
from verl.batch import Batch
from verl.errors import DataError, TrainingError


class MiniBatch:
    """Weights, totals and columns of a part's rows.

    Args:
        precision: of weights and float columns.

    Raises:
        DataError: there is not one weight a response token.
    """

    def __init__(self, part: LossTerm, precision: torch.dtype) -> None:
        rows, weights = part.rows, part.weights
        lengths = rows.lengths("response_tokens")
        if weights.shape != (sum(lengths),):
            raise DataError(f"{sum(lengths)} response tokens need as many weights, got shape {list(weights.shape)}")
        ends = list(accumulate(lengths))
        self._part, self._precision = part, precision
        self._weights = [weights[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        masked = "response_mask" in rows
        active = int(weights.count_nonzero())
        self._totals: dict[str, Any] = {
            "total_sequences": len(rows),
            "total_tokens": int(rows.tensor("response_mask").count_nonzero()) if masked else sum(lengths),
            "total_active": active,
            "total_groups": len(rows.group_indices()),
            "computed_tokens": active - sum(int(self._weights[row].count_nonzero()) for row in part.skipped),
            "computed_sequences": len(part.computed),
        }

    def loss(self, rows: list[int], batch: Batch, outputs: dict[str, Tensor]) -> Loss:
        """The loss of the micro-batch `batch`, which has these rows of the mini-batch.

        Raises:
            TrainingError: the loss function returns something else than a `Loss` of one number.
            DataError: a column has not one value a response token.
        """
        loss: object = self._part.loss(self._input(rows, batch, outputs))
        if not isinstance(loss, Loss):
            raise TrainingError(f"compute_loss must return a Loss, got {type(loss).__name__}: return Loss(total=...)")
        if loss.total.dim() != 0:
            raise TrainingError(f"Loss.total must be one number, got shape {list(loss.total.shape)}: sum it")
        return loss

    def _input(self, rows: list[int], batch: Batch, outputs: dict[str, Any]) -> LossInput:
        device = next(iter(outputs.values())).device
        lengths = batch.lengths("response_tokens")
        mask = _aligned(batch, "response_mask", lengths) if "response_mask" in batch else torch.ones(sum(lengths))
        wanted = self._part.needs.columns
        columns = {name: self._column(batch, name, lengths, device) for name in wanted if name in batch}
        if "old_log_probs" in wanted and "log_probs" in outputs:
            # One step on the policy's own samples: the policy that wrote them is the one of this very forward.
            columns.setdefault("old_log_probs", outputs["log_probs"].detach())
        mask = to_device(mask, device, torch.bool)
        # So that ratios are 1 where the head skips tokens.
        columns |= {name: torch.where(mask, columns[name], 0.0) for name in columns if name.endswith("log_probs")}
        return LossInput(
            **outputs,
            weights=to_device(torch.cat([self._weights[row] for row in rows]), device, self._precision),
            mask=mask,
            sequence=to_device(torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)), device),
            num_sequences=len(rows),
            columns=columns,
            **self._totals,
        )

    def _column(self, batch: Batch, name: str, lengths: list[int], device: torch.device) -> Tensor:
        """`group` as an index `[S]`, ragged columns flat `[R]`, others `[S]`."""
        if name == "group":
            index = torch.empty(len(batch), dtype=torch.int64)
            for number, rows in enumerate(batch.group_indices()):
                index[rows] = number
            return to_device(index, device)
        is_ragged = hasattr(batch.arrow(name).type, "value_type")
        values = _aligned(batch, name, lengths) if is_ragged else batch.tensor(name)
        return to_device(values, device, self._precision if values.is_floating_point() else None)


def _aligned(batch: Batch, name: str, lengths: list[int]) -> Tensor:
    """The flat values of a column that has one value a response token."""
    counts = batch.lengths(name)
    for row, (have, want) in enumerate(zip(counts, lengths, strict=True)):
        if have != want:
            sample = f" (id {batch['id'][row]})" if "id" in batch else ""
            raise DataError(f"column '{name}' has {have} values for {want} response tokens in a row{sample}")
    return batch.tensor(name)
