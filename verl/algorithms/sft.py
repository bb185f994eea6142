"""Supervised fine-tuning: the likelihood of the response tokens that `response_mask` marks.

With `loss_type="dft"` each token's loss is multiplied by its own probability: Wu et al., "On the Generalization of SFT"
(arXiv:2508.05629, equation 9).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from verl.algorithms.base import BaseAlgorithm, Loss, LossInput
from verl.algorithms.registry import register_algorithm
from verl.batch import Batch


@register_algorithm("sft")
class SFT(BaseAlgorithm):
    """Cross-entropy of the responses given their prompts, by default a mean over all tokens of the mini-batch.

    Options:
        loss_type: see the module.

    A response that is labelled bad, such as the rejected one of a pair, is no demonstration: it is left out, and
    counted in `sft/left_out`.
    """

    roles = frozenset({"actor"})
    loss_columns = ()
    online: ClassVar[bool] = False
    no_gradient_at_zero: ClassVar[bool] = True

    loss_type: Literal["nll", "dft"] = "nll"

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        if "label" not in batch:
            return batch, {}
        bad = batch.tensor("label", torch.float64) < 0.5
        return batch.filter((~bad).tolist()), {"sft/left_out": float(bad.sum())}

    def compute_loss(self, x: LossInput) -> Loss:
        log_probs = torch.where(x.weights != 0, self.needed_log_probs(x), 0.0)
        weights = x.weights * log_probs.detach().exp() if self.loss_type == "dft" else x.weights
        return Loss(total=-(weights * log_probs).sum())
