"""PPO: Schulman et al. (arXiv:1707.06347), in the form that RLHF uses: a token is an action, a critic values states.

Value clipping, dual clip and adaptive KL in the reward are on by default; advantages are whitened over the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl._base.record import Positive, Share
from verl.algorithms.advantages import gae, whiten
from verl.algorithms.base import Loss, LossInput
from verl.algorithms.losses import value_loss
from verl.algorithms.policy import Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.errors import DataError


class ActorCritic(PolicyGradient):
    """Base of those whose advantages may come from a critic.

    Options:
        gamma, lam: of GAE. cliprange_value: value clip; None: off.
    """

    no_gradient_at_zero = True

    gamma: Share = 1.0
    lam: Share = 1.0
    cliprange_value: Positive | None = 0.5

    def compute_critic_loss(self, x: LossInput, prefix: str = "") -> Loss:
        """Clipped value loss from `x.values` and the columns `<prefix>values` and `<prefix>returns`."""
        if x.values is None:
            raise DataError("the critic's loss needs values: train it with a value head")
        active = x.weights != 0
        values, old, returns = (
            torch.where(active, v, 0.0) for v in (x.values, x.columns[f"{prefix}values"], x.columns[f"{prefix}returns"])
        )
        per_token, clipped = value_loss(values, old, returns, self.cliprange_value)
        tokens = max(x.computed_tokens, 1)
        metrics: dict[str, Tensor | float] = {
            f"{prefix}critic/clip_fraction": (clipped & active).sum(dtype=x.weights.dtype) / tokens,
            f"{prefix}critic/value_mean": values.detach().sum() / tokens,
        }
        return Loss(total=(x.weights * per_token).sum(), metrics=metrics)


@register_algorithm("ppo")
class PPO(ActorCritic):
    """Advantages by GAE from a critic's values."""

    roles = PolicyGradient.roles | {"critic"}
    samples_per_prompt = 1

    kl_in: Literal["none", "reward", "loss"] = "reward"
    kl_target: Positive | None = 0.1

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        trajectories = e.episodes.trajectories
        values = trajectories.tokens("values")
        advantages, returns = gae(e.token_rewards, values, trajectories, self.gamma, self.lam)
        return {"advantages": whiten(advantages, e.responses.trained), "returns": returns}
