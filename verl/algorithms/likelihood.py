"""Algorithms that raise the likelihood of responses: demonstrations, or samples that a constraint, a reward or a
teacher chose."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from verl._base.record import AsTuple, Positive
from verl.algorithms.base import BaseAlgorithm, Loss, LossInput, drop_abstained, old_log_probs
from verl.algorithms.losses import bounded_ratio
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch


@register_algorithm("sft")
class SFT(BaseAlgorithm):
    """Supervised fine-tuning: cross-entropy of the responses given their prompts, by default a mean over all tokens of
    the mini-batch that `response_mask` marks.

    Options:
        loss_type: "dft": each token's loss is multiplied by its own probability: Wu et al., "On the Generalization of
            SFT" (arXiv:2508.05629, equation 9).

    A response that is labelled bad, such as the rejected one of a pair, is no demonstration: it is left out, and
    counted in `sft/left_out`.
    """

    roles = frozenset({"actor"})
    loss_columns = ()
    online = False
    no_gradient_at_zero = True

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


@register_algorithm("constrained_decoding")
class ConstrainedDecoding(SFT):
    """Responses are sampled under a constraint, and those that hold are learned by likelihood. A reward, if there is
    one, is measured.

    Rejection sampling fine-tuning as in Dong et al., "RAFT: Reward rAnked FineTuning" (arXiv:2304.06767), with a
    constraint instead of the ranking. Deviations: every response that holds counts alike, and the policy is
    updated on them once, in the step that sampled them.

    Options:
        learn: False: the constraint alone acts, and nothing is learned.
    """

    online = True
    needs_constraint = True
    measures = frozenset({"reward"})
    samples_per_prompt = 4
    read_with: ClassVar = dict.fromkeys(("loss_type", "loss_agg_mode"), ("learn",))

    learn: bool = True

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The rows whose response holds, recorded ones all; `constraint/accepted` is their share."""
        ended = batch["finish"] if "finish" in batch else ["stop"] * len(batch)
        holds = [finish not in ("reject", "abort") for finish in ended]
        accepted = sum(holds) / max(len(holds), 1)
        return batch.filter(holds if self.learn else [False] * len(holds)), {"constraint/accepted": accepted}


@register_algorithm("reward_conditioned")
class RewardConditioned(SFT):
    """The prompt says how good a response shall be, and the policy learns what such ones are: the likelihood of samples
    under the condition that their reward has reached.

    Lu et al., "Quark: Controllable Text Generation with Reinforced Unlearning" (arXiv:2205.13636), after Chen et al.,
    "Decision Transformer" (arXiv:2106.01345): sample under the highest condition, find the condition that each sample's
    reward has reached, and raise the sample's likelihood under that one. Samples of the trained policy need the prefix
    of the highest condition before the prompt, as rollouts and evaluations do.

    Deviations from Quark:

    - A condition is a text before the prompt, in the words of the tokenizer, not a new token: the model stays as it is.
    - There is no pool of former samples: conditions are quantiles within the update's own samples, so that what counts
      as high rises with the policy.
    - Quantiles are of distinct rewards, so that equal rewards have one condition. Where they are fewer than the
      conditions, they are spread over these: the best has the highest, the worst the lowest. If all are equal, that is
      the lowest.
    - There are no KL and entropy terms.

    Options:
        prefixes: the texts before a prompt, one a condition, from the lowest to the highest.
    """

    roles = frozenset({"actor", "reward"})
    online = True

    prefixes: Annotated[tuple[str, ...], AsTuple, Field(min_length=2)] = tuple(
        f"Reward {i} of 5.\n" for i in range(1, 6)
    )

    def prompt_prefixes(self, batch: Batch) -> list[str]:
        """Those of the column `condition`, which `prepare` adds; without it, of the highest."""
        if "condition" not in batch:
            return [self.prefixes[-1]] * len(batch)
        return [self.prefixes[condition] for condition in batch["condition"]]

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The rows that have a reward, and column `condition`: the number of their prefix."""
        batch, metrics = drop_abstained(batch)
        rewards = Responses(batch).rewards
        # Ranks of distinct rewards in equal bins; fewer bins than prefixes are spread from the lowest to the highest.
        distinct, rank = rewards.unique(return_inverse=True)
        highest, bins = len(self.prefixes) - 1, min(len(self.prefixes), len(distinct))
        condition = rank * bins // max(len(distinct), 1) * highest // max(bins - 1, 1)
        metrics["condition/highest"] = float((condition == highest).sum()) / max(len(batch), 1)
        return batch.add({"condition": condition.tolist()}), metrics


@register_algorithm("distillation")
class Distillation(BaseAlgorithm):
    """Reverse KL to a teacher, by default a mean over all tokens. A reward, if there is one, is measured.

    Agarwal et al., "On-Policy Distillation of Language Models" (arXiv:2306.13649), with the reverse KL and all samples
    the student's: the policy's own samples, and a teacher's log-probs of them. The teacher is the reference policy:
    `actor.make_reference(teacher)`, or `ref.path` of a YAML; its vocabulary must be the policy's. Without one it is the
    policy as it was at first, and nothing is learned.

    Deviation: the paper differentiates the KL of whole distributions at each token; here its gradient is estimated by
    the policy gradient of a reward log p(teacher) - log p(policy) of each sampled token, which is credited with its own
    reward alone. So a teacher costs one forward pass and no memory for logits.

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
