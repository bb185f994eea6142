"""Reward-conditioned training: the prompt says how good a response shall be, and the policy learns what such ones are.

Lu et al., "Quark: Controllable Text Generation with Reinforced Unlearning" (arXiv:2205.13636), after Chen et al.,
"Decision Transformer" (arXiv:2106.01345): sample under the highest condition, find the condition that each sample's
reward has reached, and raise the sample's likelihood under that one.

Deviations from Quark:

- A condition is a text before the prompt, in the words of the tokenizer, not a new token: the model stays as it is.
- There is no pool of former samples: conditions are quantiles within the update's own samples, so that what counts as
  high rises with the policy.
- Quantiles are of distinct rewards, so that equal rewards have one condition. Where they are fewer than the conditions,
  they are spread over these: the best has the highest, the worst the lowest. If all are equal, that is the lowest.
- There are no KL and entropy terms.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from verl.algorithms.base import drop_abstained
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.algorithms.sft import SFT
from verl.batch import Batch
from verl.record import AsTuple


@register_algorithm("reward_conditioned")
class RewardConditioned(SFT):
    """Likelihood of samples under the condition that their reward has reached, by default a mean over all tokens.

    Samples of the trained policy need the prefix of the highest condition before the prompt, as rollouts and
    evaluations do.

    Options:
        prefixes: the texts before a prompt, one a condition, from the lowest to the highest.
    """

    roles = frozenset({"actor", "reward"})
    online: ClassVar[bool] = True

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
        responses = Responses(batch)
        by_token = "token_rewards" in batch
        rewards = (
            responses.sum(responses.tokens("token_rewards")) if by_token else batch.tensor("reward", torch.float64)
        )
        distinct, rank = rewards.unique(return_inverse=True)
        highest, bins = len(self.prefixes) - 1, min(len(self.prefixes), len(distinct))
        condition = rank * bins // max(len(distinct), 1) * highest // max(bins - 1, 1)
        metrics["condition/highest"] = float((condition == highest).sum()) / max(len(batch), 1)
        return batch.add({"condition": condition.tolist()}), metrics
