"""On-policy distillation: the policy's own samples, and a teacher's log-probs of them (Agarwal et al., "On-Policy
Distillation of Language Models", arXiv:2306.13649, with the reverse KL and all samples the student's).

The teacher is the reference policy: `actor.make_reference(teacher)`, or `ref.path` of a YAML; its vocabulary must be
the policy's. Without one it is the policy as it was at first, and nothing is learned. Deviation: the paper
differentiates the KL of whole distributions at each token; here its gradient is estimated by the policy gradient of a
reward log p(teacher) - log p(policy) of each sampled token, which is credited with its own reward alone. So a teacher
costs one forward pass and no memory for logits.
"""

from __future__ import annotations

import torch

from verl._base.record import Positive
from verl.algorithms.base import BaseAlgorithm, Loss, LossInput, old_log_probs
from verl.algorithms.losses import bounded_ratio
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch


@register_algorithm("distillation")
class Distillation(BaseAlgorithm):
    """Reverse KL to a teacher, by default a mean over all tokens. A reward, if there is one, is measured.

    Options:
        max_log_ratio: bound of log p(teacher) - log p(policy) of a token, in nats; None: none.
    """

    roles = frozenset({"actor", "reference"})
    measures = frozenset({"reward"})
    samples_per_prompt = 4
    no_gradient_at_zero = True

    max_log_ratio: Positive | None = 10.0

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Column `advantages`; `kl` is the mean estimate a token, before the bound.

        Raises:
            DataError: no column `ref_log_probs`, the teacher's, or no log-probs of the policy.
        """
        responses = Responses(old_log_probs(batch))
        ratio = responses.tokens("ref_log_probs") - responses.tokens("old_log_probs")
        ratio = torch.where(responses.written, ratio, 0.0)
        kl = -float(ratio.sum() / responses.written.sum().clamp(min=1))
        if self.max_log_ratio is not None:
            ratio = ratio.clamp(-self.max_log_ratio, self.max_log_ratio)
        return responses.store({"advantages": torch.where(responses.trained, ratio, 0.0)}), {"kl": kl}

    def compute_loss(self, x: LossInput) -> Loss:
        current, active = self.needed_log_probs(x), x.weights != 0
        old = x.columns.get("old_log_probs", current.detach())
        ratio = bounded_ratio(torch.where(active, current - old, 0.0))
        advantages = torch.where(active, x.columns["advantages"], 0.0)
        return Loss(total=-(x.weights * advantages * ratio).sum())
