"""Algorithms that differ in the baseline of a reward: the baseline of an advantage.

Their loss is PPO's clipped one, as in verl, which on the first step of a batch is plain REINFORCE; `GPG` has no ratio,
and `RLOO`'s may be the whole response's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from verl._base.names import check_known
from verl._base.record import Count, Natural, NotNegative, Positive, Share
from verl.algorithms import advantages as adv
from verl.algorithms.base import present
from verl.algorithms.episodes import Episodes
from verl.algorithms.losses import AggregationMode, PolicyLoss, PolicyTerms, bounded_ratio
from verl.algorithms.policy import NO_CLIP, Experience, PolicyGradient
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError


@register_algorithm("grpo")
class GRPO(PolicyGradient):
    """Advantage: the reward, centred within the group of samples of one prompt, and scaled: Shao et al., "DeepSeekMath"
    (arXiv:2402.03300).

    Deviations: "token-mean" aggregation as in verl (the paper's is "seq-mean-token-mean"), and no KL term unless
    `kl_in="loss"` (the paper's): most users train without a reference model today.

    Options:
        norm_adv_by_std: divide by the standard deviation of the group; "batch": of all rewards; false: not at all.
        std_epsilon: added to it.
    """

    needs_groups = True
    zero_where_alike = True
    read_with: ClassVar = {"std_epsilon": ("norm_adv_by_std",)}

    norm_adv_by_std: bool | Literal["batch"] = True
    std_epsilon: Positive = adv.STD_EPSILON

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        advantages = adv.grpo(e.outcome, e.responses.groups, self.norm_adv_by_std, self.std_epsilon)
        return {"advantages": advantages[e.responses.sequence]}


@register_algorithm("dr_grpo")
class DrGRPO(GRPO):
    """Dr. GRPO: Liu et al., "Understanding R1-Zero-Like Training" (arXiv:2503.20783).

    GRPO without its two biases: no division by the group's standard deviation, and sums over tokens divided by a
    constant instead of by the response's length. Set `loss_scale_factor` to the most new tokens.
    """

    norm_adv_by_std: bool = False
    loss_agg_mode: AggregationMode = "seq-mean-token-sum-norm"


@register_algorithm("dapo")
class DAPO(GRPO):
    """GRPO with clip-higher, token-level loss, dynamic sampling (groups without a signal are sampled again, within the
    trainer's bound) and soft overlong punishment (equation 13): Yu et al., "DAPO: An Open-Source LLM Reinforcement
    Learning System at Scale" (arXiv:2503.14476). Responses longer than the limit are punished like those at it.

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
        if self.overlong_length is not None:
            self.own_rewards = "overlong_length"
            if not 0 < self.overlong_buffer <= self.overlong_length:
                raise ConfigError(f"{self.name}: overlong_length needs 0 < overlong_buffer <= overlong_length")

    def keep(self, batch: Batch) -> list[bool] | None:
        """Rows that did not abstain, of groups in which at least two episodes differ in `filter_metric`."""
        if not self.filter_groups:
            return None
        episodes = Episodes(batch)
        if self.filter_metric == "outcome":
            values = self.outcome_rewards(episodes.batch)
        else:
            known = [*episodes.batch.columns, "outcome"]
            check_known(f"{self.name}: filter_metric is no column of the samples:", [self.filter_metric], known)
            values = episodes.batch.tensor(self.filter_metric, torch.float64)
        good = values.isfinite() & present(episodes.batch)
        groups = episodes.responses.groups[good]
        useful = ~adv.group_equal(values[good], groups) & (adv.group_sizes(groups) > 1)
        differs = good.clone()
        differs[good] = useful
        of_prompt = adv.group_sums(differs[episodes.number].double(), Responses(batch).groups) > 0
        return (of_prompt & good[episodes.whole][episodes.number]).tolist()

    def own_outcome(self, batch: Batch) -> Tensor:
        """The overlong punishment."""
        if self.overlong_length is None:
            return super().own_outcome(batch)
        lengths = torch.tensor(batch.lengths("response_tokens"), dtype=torch.float64)
        excess = lengths - (self.overlong_length - self.overlong_buffer)
        return -self.overlong_penalty * (excess / self.overlong_buffer).clamp(0, 1)


@register_algorithm("grpo_passk")
class GRPOPassK(GRPO):
    """GRPO for pass@k: only the best sample of a group learns, by its lead over the second best. Tang et al.,
    "Optimizing Language Models for Inference Time Objectives" (arXiv:2503.19595).

    Deviation: a group of one has no second best, so its advantage is 0; in verl it is an error.
    """

    zero_where_alike = True
    unread = dict.fromkeys(("clip_ratio_low", "clip_ratio_c"), "it clips negative advantages, and there are none")

    norm_adv_by_std: bool = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        rewards, groups = e.outcome, e.responses.groups
        advantages = torch.zeros_like(rewards)
        for number in groups.unique():
            rows = (groups == number).nonzero().flatten()
            if len(rows) > 1:
                # Of several best rows none has a lead: all advantages are 0.
                best, second = rewards[rows].topk(2).values
                advantages[rows[rewards[rows].argmax()]] = best - second
        if self.norm_adv_by_std:
            advantages /= adv.group_std(rewards, groups) + self.std_epsilon
        return {"advantages": advantages[e.responses.sequence]}


@register_algorithm("rloo")
class RLOO(PolicyGradient):
    """Advantage: the reward minus the mean reward of the group's other samples. Ahmadian et al., "Back to Basics:
    Revisiting REINFORCE Style Optimization" (arXiv:2402.14740, equation 8).

    Deviation, as in verl: a ratio of each token. With `ratio_of="sequence"` it is the whole response's, as in the
    paper.

    Options:
        ratio_of: what the ratio of the loss is of: a "token", or the "sequence", whose loss is then one number that all
            of its tokens have.
        std_epsilon: divide advantages by their standard deviation over all samples, plus this; None: not.
    """

    needs_groups = True
    no_gradient_at_zero = True
    zero_where_alike = True

    ratio_of: Literal["token", "sequence"] = "token"
    std_epsilon: NotNegative | None = None

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        sizes = adv.group_sizes(e.responses.groups)
        of_others = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 1.0)
        advantages = adv.group_centred(e.outcome, e.responses.groups) * of_others
        if self.std_epsilon is not None and len(advantages) > 1:
            advantages = advantages / (advantages.std() + self.std_epsilon)
        return {"advantages": advantages[e.responses.sequence]}

    def ratio(self, t: PolicyTerms) -> Tensor:
        if self.ratio_of == "token":
            return super().ratio(t)
        # The row's value at each token, and through a token's own log-prob its part of the row's gradient: times the
        # number of tokens, for the mean over them that "seq-mean-token-mean" takes.
        row, tokens = t.row_sum(t.log_ratio).detach(), t.row_sum(torch.ones_like(t.log_probs)).detach()
        return bounded_ratio(row + tokens * (t.log_probs - t.log_probs.detach()))


@register_algorithm("opo")
class OPO(PolicyGradient):
    """Advantage: the reward minus the group's length-weighted mean, the baseline of least variance. Hao et al.,
    "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585, equation 8)."""

    needs_groups = True
    zero_where_alike = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        groups, lengths = e.responses.groups, e.responses.sum(e.responses.written)
        mean = adv.group_sums(lengths * e.outcome, groups) / adv.group_sums(lengths, groups).clamp(min=1)
        baseline = torch.where(adv.group_sizes(groups) > 1, mean, 0.0)
        advantages = torch.where(adv.group_equal(e.outcome, groups), 0.0, e.outcome - baseline)
        return {"advantages": advantages[e.responses.sequence]}


@register_algorithm("gpg")
class GPG(PolicyGradient):
    """Plain policy gradient, no ratio: centred rewards, scaled up for rows that carry no signal. Chu et al., "GPG: A
    Simple and Strong Reinforcement Learning Baseline" (arXiv:2504.02546).

    Deviation, as in verl: advantages are multiplied by rows / rows whose reward is not 0 (before a KL penalty); the
    paper's factor is rows / rows of groups whose rewards differ.
    """

    needs_groups = True
    zero_where_alike = True
    has_ratio = False
    no_gradient_at_zero = True
    unread = NO_CLIP

    f_norm: Positive = 1.0

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        scale = len(e.outcome) / self.outcome_rewards(e.batch).count_nonzero().clamp(min=1).double()
        advantages = scale * adv.group_centred(e.outcome, e.responses.groups) / self.f_norm
        return {"advantages": advantages[e.responses.sequence]}

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        return PolicyLoss(-t.advantages * t.log_probs)


@register_algorithm("reinforce_plus_plus")
class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++: the discounted rewards to go, whitened over all tokens of the batch. No critic, no groups. Hu,
    "REINFORCE++" (arXiv:2501.03262)."""

    samples_per_prompt = 1

    gamma: Share = 1.0

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        returns = adv.discounted_returns(e.token_rewards, e.episodes.trajectories, self.gamma)
        return {"advantages": adv.whiten(returns, e.responses.trained)}


@register_algorithm("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(PolicyGradient):
    """The baseline variant of REINFORCE++: the reward minus the group's mean, whitened over all tokens of the batch."""

    needs_groups = True

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        centred = adv.group_centred(e.outcome, e.responses.groups)
        return {"advantages": adv.whiten(centred[e.responses.sequence], e.responses.trained)}


@register_algorithm("remax")
class ReMax(PolicyGradient):
    """Advantage: the rewards to go minus the reward of the prompt's greedy response. Li et al., "ReMax: A Simple,
    Effective, and Efficient Reinforcement Learning Method" (arXiv:2310.10505).

    The greedy sample of each prompt is part of the same rollout. Where its reward abstained there is no baseline, so
    the group does not train.
    """

    greedy_baseline = True
    samples_per_prompt = 1

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        episodes = Episodes(batch)
        greedy = episodes.batch.tensor("baseline") != 0
        rewards = self.outcome_rewards(episodes.batch)
        usable = greedy & present(episodes.batch)
        groups = episodes.responses.groups
        count = adv.group_sums(usable.double(), groups)
        baseline = adv.group_sums(torch.where(usable, rewards, 0.0), groups) / count.clamp(min=1)
        # Greedy rows leave here: whitening, KL and metrics are of sampled rows, which carry their baseline as a column.
        train = ~greedy & (count > 0)
        number = episodes.number
        batch = batch.add({"reward_baseline": baseline[number]}).filter(train[number].tolist())
        batch, metrics = super().prepare(batch)
        without = int((~greedy & (count == 0)).sum())
        mean = float(rewards[usable].mean()) if usable.any() else 0.0
        return batch, {**metrics, "remax/baseline_reward": mean, "remax/without_baseline": float(without)}

    def estimate(self, e: Experience) -> dict[str, Tensor]:
        returns = adv.discounted_returns(e.token_rewards, e.episodes.trajectories)
        baseline = e.batch.tensor("reward_baseline", torch.float64)
        return {"advantages": returns - baseline[e.responses.sequence]}
