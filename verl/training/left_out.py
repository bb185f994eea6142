"""Which rows of a mini-batch an update does not compute, because their gradient is 0 whatever the model predicts.

All else is decided over all rows: mini-batches, weights, denominators, and whether there is an optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.loss_terms import LossNeeds
from verl.batch import Batch


def left_out(rows: Batch, weights: Tensor, needs: LossNeeds, *, auxiliary_loss: bool = False) -> list[int]:
    """The numbers of these rows, ascending. There are none, unless the loss states `no_gradient_at_zero`, rows are not
    coupled in it, and the model adds no loss of its own. A row is left out, then,

    - if all of its weights are 0: all of its tokens were rejected, or the policy wrote none; or
    - if each of its tokens of a weight other than 0 has an advantage of 0, as stored, without a tolerance, and nothing
      beside advantages counts in the loss (`LossNeeds.advantages_decide`).

    Args:
        rows: a mini-batch, of all ranks.
        weights: `[R]`, of their response tokens.
        auxiliary_loss: the model adds one.
    """
    lengths = rows.lengths("response_tokens")
    fits = len(weights) == sum(lengths)  # else the mini-batch is refused, see `MiniBatch`
    if not needs.no_gradient_at_zero or needs.coupled or auxiliary_loss or not fits:
        return []
    counts = weights != 0
    if needs.advantages_decide and "advantages" in rows and rows.lengths("advantages") == lengths:
        counts &= rows.tensor("advantages") != 0
    row_of_token = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    has_gradient = torch.zeros(len(rows), dtype=torch.bool)
    has_gradient[row_of_token[counts]] = True
    return (~has_gradient).nonzero().flatten().tolist()
