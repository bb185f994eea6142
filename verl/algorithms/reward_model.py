"""Reward-model training: the Bradley-Terry likelihood of preference pairs (arXiv:2203.02155, equation 1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch.nn.functional import logsigmoid

from verl.algorithms.base import NOT_BY_TOKEN, BaseAlgorithm, Loss, LossInput
from verl.algorithms.episodes import one_trajectory
from verl.algorithms.pairs import accuracy, only_pairs, split_pairs
from verl.algorithms.registry import register_algorithm
from verl.batch import Batch
from verl.errors import DataError
from verl.record import NotNegative


@register_algorithm("reward_model")
class RewardModel(BaseAlgorithm):
    """-log sigmoid(chosen - rejected), averaged over pairs.

    Options:
        center_rewards_coefficient: weight of (chosen + rejected)^2, which keeps scores near 0 (arXiv:2312.09244).
    """

    roles = frozenset({"actor"})
    loss_columns = ("group", "label")
    unread = NOT_BY_TOKEN
    online: ClassVar[bool] = False
    coupled: ClassVar[bool] = True
    head: ClassVar[Literal["lm", "score"]] = "score"

    center_rewards_coefficient: NotNegative = 0.0

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return only_pairs(one_trajectory(batch, self.name))

    def compute_loss(self, x: LossInput) -> Loss:
        if x.scores is None:
            raise DataError("reward_model needs scores: train it with a score head")
        chosen, rejected = split_pairs(x, x.scores)
        pairs = max(x.total_groups, 1)
        total = -logsigmoid(chosen - rejected).sum() / pairs
        total = total + self.center_rewards_coefficient * (chosen + rejected).square().sum() / pairs
        metrics = {
            "pairs/accuracy": accuracy(chosen, rejected) / pairs,
            "pairs/margin": (chosen - rejected).detach().sum() / pairs,
        }
        return Loss(total=total, metrics={**metrics})
