"""DAPO: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476).

Clip-higher, token-level loss, dynamic sampling (groups without a signal are sampled again, within the trainer's
bound) and soft overlong punishment (equation 13). Responses longer than the limit are punished like those at it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from verl._base.record import Count, Natural, NotNegative, Positive
from verl.algorithms.advantages import group_equal, group_sizes, group_sums
from verl.algorithms.base import present
from verl.algorithms.baselines import GRPO
from verl.algorithms.episodes import Episodes
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError


@register_algorithm("dapo")
class DAPO(GRPO):
    """GRPO with DAPO's four changes.

    Options:
        filter_groups: dynamic sampling; filter_metric: the row column whose equality makes a group useless, or
            "outcome", the reward with the punishment.
        overlong_length: limit of the response in tokens (None: no punishment); overlong_buffer: tokens before the
            limit over which the punishment grows from 0 to overlong_penalty.
    """

    zero_where_alike = True
    read_with: ClassVar = {
        "filter_metric": ("filter_groups",),
        **dict.fromkeys(("overlong_buffer", "overlong_penalty"), ("overlong_length",)),
    }

    clip_ratio_high: NotNegative | None = 0.28
    filter_groups: bool = True
    filter_metric: str = "reward"
    overlong_length: Count | None = None
    overlong_buffer: Natural = 0
    overlong_penalty: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong_length is not None and not 0 < self.overlong_buffer <= self.overlong_length:
            raise ConfigError(f"{self.name}: overlong_length needs 0 < overlong_buffer <= overlong_length")

    @property
    def own_rewards(self) -> str | None:
        return None if self.overlong_length is None else "overlong_length"

    def keep(self, batch: Batch) -> list[bool] | None:
        """Rows that did not abstain, of groups in which at least two episodes differ in `filter_metric`."""
        if not self.filter_groups:
            return None
        episodes = Episodes(batch)
        if self.filter_metric == "outcome":
            values = self.outcome_rewards(episodes.batch)
        else:
            values = episodes.batch.tensor(self.filter_metric, torch.float64)
        good = values.isfinite() & present(episodes.batch)
        groups = episodes.responses.groups[good]
        useful = ~group_equal(values[good], groups) & (group_sizes(groups) > 1)
        differs = good.clone()
        differs[good] = useful
        of_prompt = group_sums(differs[episodes.number].double(), Responses(batch).groups) > 0
        return (of_prompt & good[episodes.whole][episodes.number]).tolist()

    def own_outcome(self, batch: Batch) -> Tensor:
        """The overlong punishment."""
        if self.overlong_length is None:
            return super().own_outcome(batch)
        lengths = torch.tensor(batch.lengths("response_tokens"), dtype=torch.float64)
        excess = lengths - (self.overlong_length - self.overlong_buffer)
        return -self.overlong_penalty * (excess / self.overlong_buffer).clamp(0, 1)
