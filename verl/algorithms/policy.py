"""The common part of online policy-gradient algorithms: token rewards, KL, off-policy correction, and the actor's loss.

A subclass says how advantages come from rewards (`estimate`) and, where it is not PPO's, what the loss of a
token is (`policy_loss`).

Deviations: rejected tokens leave the loss and the whitening, not the recursions of the estimators (a rejected
last token would take the reward with it). The adaptive coefficient works with KL in the loss, too.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl._base.record import Count, NotNegative, Number, Positive
from verl.algorithms import correction
from verl.algorithms.advantages import group_equal
from verl.algorithms.base import (
    ACTOR_COLUMNS,
    BaseAlgorithm,
    Loss,
    LossInput,
    drop_abstained,
    old_log_probs,
    present,
    states,
)
from verl.algorithms.episodes import Episodes
from verl.algorithms.kl import MAX_LOG_RATIO, Estimator, adapted, kl_estimate
from verl.algorithms.losses import PolicyLoss, PolicyTerms, bounded_ratio, clipped_loss
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import ConfigError, DataError

#: `unread` of a token loss without PPO's dual clip.
NO_DUAL_CLIP = {"clip_ratio_c": "its loss has no dual clip"}
#: `unread` of one that clips no ratio.
NO_CLIP = dict.fromkeys(
    ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), "its loss does not clip the ratio"
)
#: The methods that advantages come from.
_OF_REWARDS = ("prepare", "estimate", "outcome_rewards", "own_outcome")


@dataclass(frozen=True)
class Experience:
    """What advantages are estimated from; fp64, detached. A row is an episode: of single turns a response, else the
    tokens of all its trajectories.

    Attributes:
        batch: without rows that abstained.
        responses: its lengths, masks and groups.
        token_rewards: `[R]`, KL penalty subtracted.
        outcome: `[S]`, reward of each row, KL penalty subtracted: the sum of its token rewards, and of a row
            without written tokens, which has no place for one, the reward itself.
        kl_penalty: `[R]`, what was subtracted (zeros if KL is not in the reward).
        episodes: its trajectories as rows, too: what runs from token to token runs along `episodes.trajectories`, whose
            tokens are the same.
    """

    batch: Batch
    responses: Responses
    token_rewards: Tensor
    outcome: Tensor
    kl_penalty: Tensor
    episodes: Episodes


class PolicyGradient(BaseAlgorithm):
    """Base of the online algorithms.

    Options:
        clip_ratio, clip_ratio_low, clip_ratio_high: bounds of the ratio, 1 - low and 1 + high; low and high are
            `clip_ratio` where not given.
        clip_ratio_c: dual clip for negative advantages; None: off.
        entropy_coeff: weight of the entropy bonus.
        kl_in: where KL to the reference counts: "none" (no reference model), "reward" or "loss".
        kl_estimator: see `kl`; None: k1 in the reward (its policy gradient is the KL's), k3 in the loss (GRPO's).
        kl_by_ratio: multiply a token's KL in the loss by its ratio to the old policy, through which it has a gradient,
            too: then k3's is the KL's (DeepSeek-V3.2, arXiv:2512.02556).
        kl_coef: weight of the KL; with kl_target (nats a token) it starts there and adapts over kl_horizon samples.
        rollout_is, rollout_is_threshold, rollout_is_lower, rollout_is_normalize: importance weights between the
            engine's and the trainer's log-probs, applied when the batch has both; see `correction`. "ratio": no
            weights; the loss's own ratio is to the engine's log-probs, and the trainer computes none before the update.
        rollout_rs, rollout_rs_threshold, rollout_rs_lower: rejection between them.
    """

    loss_columns = (*ACTOR_COLUMNS, "rollout_log_probs", "rollout_is_weights")
    no_gradient_at_zero = True
    #: A statement about `estimate` and the rewards that it reads, lost when they are overridden, as
    #: `no_gradient_at_zero` is: advantages are 0 where all samples of a prompt, of several, have one reward.
    zero_where_alike = False
    #: Whether the loss has a ratio to the old policy.
    has_ratio = True
    _state: ClassVar = {"kl_coef": "_kl_coef"}
    read_with: ClassVar = {
        **dict.fromkeys(("kl_estimator", "kl_coef", "kl_target"), ("kl_in", "reward", "loss")),
        "kl_by_ratio": ("kl_in", "loss"),
        "kl_horizon": ("kl_target",),
        **dict.fromkeys(("rollout_is_threshold", "rollout_is_lower"), ("rollout_is", "token", "sequence")),
        "rollout_is_normalize": ("rollout_is", "token", "sequence"),
        **dict.fromkeys(("rollout_rs_threshold", "rollout_rs_lower"), ("rollout_rs",)),
    }

    clip_ratio: NotNegative = 0.2
    clip_ratio_low: NotNegative | None = None
    clip_ratio_high: NotNegative | None = None
    clip_ratio_c: Annotated[float, Field(gt=1, le=1e9)] | None = 3.0
    entropy_coeff: Number = 0.0
    kl_in: Literal["none", "reward", "loss"] = "none"
    kl_estimator: Estimator | None = None
    kl_by_ratio: bool = False
    kl_coef: NotNegative = 0.01
    kl_target: Positive | None = None
    kl_horizon: Count = 10_000
    rollout_is: correction.Level | Literal["ratio"] | None = "token"
    rollout_is_threshold: Positive = 2.0
    rollout_is_lower: NotNegative | None = None
    rollout_is_normalize: bool = False
    rollout_rs: correction.Rejection | None = None
    rollout_rs_threshold: Positive = 2.0
    rollout_rs_lower: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # By "ratio" the old policy is the engine. Without a ratio, only the correction reads old log-probs.
        self.keeps_old_log_probs = self.rollout_is == "ratio"
        corrects = self.has_ratio or self.rollout_is is not None or self.rollout_rs is not None
        self.needs_old_log_probs &= corrects and not self.keeps_old_log_probs
        self.needs_entropy = self.entropy_coeff != 0
        if self.kl_in == "loss":
            self.loss_columns += ("ref_log_probs", "kl_coef")
        if self.kl_in != "none":
            self.roles |= {"reference"}
        low, high = self.clip_ratio_low, self.clip_ratio_high
        self.clip_bounds = (self.clip_ratio if low is None else low, self.clip_ratio if high is None else high)
        if self.kl_in != "none" and self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                f"algorithm '{self.name}': kl_coef=0 stays 0 whatever kl_target asks for: give a kl_coef above 0 to "
                "start from, or kl_in='none' for no KL at all"
            )
        if self.rollout_is_lower is not None and self.rollout_is_lower > self.rollout_is_threshold:
            raise ConfigError(
                f"rollout_is_lower={self.rollout_is_lower} is above rollout_is_threshold={self.rollout_is_threshold}, "
                "so that every weight would be 0: give a lower bound below 1 and a threshold above it, or leave "
                "rollout_is_lower out"
            )
        if self.keeps_old_log_probs and (self.rollout_rs is not None or not self.has_ratio):
            why = "its loss has no ratio" if self.rollout_rs is None else "rollout_rs reads the trainer's log-probs"
            raise ConfigError(f"algorithm '{self.name}': rollout_is='ratio', but {why}: write rollout_is='token'")
        if self.rollout_rs is not None:
            correction.rejection_bounds(self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_lower)
        #: `bound` of `kl_estimate`.
        self.kl_bound = MAX_LOG_RATIO
        self._kl_coef = self.kl_coef  # as `kl_target` has moved it

    def why_unread(self, option: str) -> str | None:
        sides = [side for side in ("clip_ratio_low", "clip_ratio_high") if side not in self.unread]
        if option == "clip_ratio" and sides and all(getattr(self, side) is not None for side in sides):
            return " and ".join(sides) + " take its place"
        if option == "kl_estimator" and self.kl_in == "reward" and (self.kl_estimator or "").endswith("+"):
            return "a '+' is about the gradient, and a reward has none: leave the '+' out"
        return super().why_unread(option)

    def token_kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """KL to the reference at each token, by the estimator in use."""
        default = "k3" if self.kl_in == "loss" else "k1"
        return kl_estimate(log_probs, ref_log_probs, self.kl_estimator or default, self.kl_bound)

    @abstractmethod
    def estimate(self, e: Experience) -> dict[str, Tensor]:
        """Columns, each `[R]`: `advantages`, and others that a loss reads (`returns` for a critic)."""

    def own_outcome(self, batch: Batch) -> Tensor:
        """`[S]`: what the algorithm itself adds to each row's reward, at its last token; see `own_rewards`."""
        return torch.zeros(len(batch), dtype=torch.float64)

    def outcome_rewards(self, batch: Batch) -> Tensor:
        """`[S]`: the reward of each row, see `Responses`, with the algorithm's own."""
        return Responses(batch).rewards + self.own_outcome(batch)

    def policy_loss(self, t: PolicyTerms) -> PolicyLoss:
        """Loss per token of the actor."""
        return clipped_loss(self.ratio(t), t.advantages, *self.clip_bounds, self.clip_ratio_c)

    def ratio(self, t: PolicyTerms) -> Tensor:
        """`[R]`: of each token's probability to that under the old policy, with gradient."""
        return bounded_ratio(t.log_ratio)

    def importance(self, t: PolicyTerms, weights: Tensor) -> Tensor:
        """Factor of each token's loss from the importance weights `[R]` of the off-policy correction."""
        return weights

    def needs(self, batch: Batch, role: str) -> list[bool] | None:
        """For the actor, where rewards alone decide whether an advantage is 0: samples with a reward, of prompts whose
        samples scored differently."""
        alone = states(self, "zero_where_alike", _OF_REWARDS) and self.kl_in == "none"
        if role != "actor" or not alone or self.rollout_rs is not None or self.rollout_is_normalize:
            return None
        episodes = Episodes(batch)
        needed = present(episodes.batch)
        scored = episodes.batch.filter(needed.tolist())
        needed[needed.clone()] = ~group_equal(self.outcome_rewards(scored), Responses(scored).groups)
        return needed[episodes.number].tolist()

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch, metrics = drop_abstained(batch, by_group=self.needs_groups)
        if self.keeps_old_log_probs:
            # The loss's own ratio is the correction: its old policy is the engine that sampled.
            old = {"old_log_probs": batch.arrow("rollout_log_probs")}
            batch = batch.drop(["log_probs", "old_log_probs"]).add(old)
        batch, measured = self._correct(old_log_probs(batch))
        episodes = Episodes(batch)
        responses = episodes.responses
        coefficient = self._kl_coef  # of this batch; measuring its KL moves it for the next
        penalty, kl_metrics = self._kl_penalty(responses)
        rewards, outcome = self._rewards(episodes)
        experience = Experience(
            episodes.batch, responses, rewards - penalty, outcome - responses.sum(penalty), penalty, episodes
        )
        columns = self.estimate(experience)
        # Rejected tokens were part of the estimator's recursions; in the loss they have no advantage.
        columns["advantages"] = torch.where(responses.trained, columns["advantages"], 0.0)
        advantages = columns["advantages"][responses.trained]
        metrics |= measured | kl_metrics
        metrics["advantages/mean"] = float(advantages.mean()) if len(advantages) else 0.0
        metrics["advantages/abs_mean"] = float(advantages.abs().mean()) if len(advantages) else 0.0
        prepared = episodes.trajectories.store(columns)
        if self.kl_in == "loss":
            # It travels in the batch, since the loss may run in another process, whose coefficient does not adapt.
            prepared = prepared.add({"kl_coef": torch.full((len(prepared),), coefficient, dtype=torch.float64)})
        return prepared, metrics

    def terms(self, x: LossInput, active: Tensor) -> PolicyTerms:
        """The terms of a loss, 0 at tokens that are not `active`, `[R]`. Without a column `old_log_probs` the old
        policy is the current one."""
        current = self.needed_log_probs(x)
        old = x.columns.get("old_log_probs", current.detach())
        # Not times 0: a token that does not count may have an infinite ratio, and 0 * inf would spoil the sum.
        values = (current, current - old, x.columns["advantages"])
        log_probs, log_ratio, advantages = (torch.where(active, of, 0.0) for of in values)
        return PolicyTerms(log_probs, log_ratio, advantages, active, x.sequence, x.num_sequences)

    def compute_loss(self, x: LossInput) -> Loss:
        active = x.weights != 0
        terms = self.terms(x, active)
        loss = self.policy_loss(terms)
        per_token = loss.per_token
        if "rollout_is_weights" in x.columns:
            per_token = per_token * self.importance(terms, x.columns["rollout_is_weights"])
        total = policy = (x.weights * per_token).sum()
        metrics: dict[str, Tensor | float] = {"loss/policy": policy.detach(), **_policy_metrics(x, terms, loss)}
        if "rollout_log_probs" in x.columns:  # the policy is the one that sampled, and nothing has measured it yet
            difference = self.needed_log_probs(x).detach() - x.columns["rollout_log_probs"]
            metrics |= correction.mismatch_shares(difference, active, x.computed_tokens)
        if self.kl_in == "loss":
            kl = self.token_kl(terms.log_probs, torch.where(active, x.columns["ref_log_probs"], 0.0))
            kl = kl * self.ratio(terms) if self.kl_by_ratio else kl
            penalty = (x.weights * x.columns["kl_coef"][x.sequence] * kl).sum()
            total = total + penalty
            metrics["loss/kl"] = penalty.detach()
        if self.entropy_coeff and x.entropy is not None:
            bonus = self.entropy_coeff * (x.weights * torch.where(active, x.entropy, 0.0)).sum()
            total = total - bonus
            metrics["loss/entropy"] = -bonus.detach()
        return Loss(total=total, metrics=metrics)

    def _rewards(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """`[R]` and `[S]`: `token_rewards` where given, else the reward at the last token of each trajectory; and the
        outcome."""
        outcome, trajectories = self.outcome_rewards(episodes.batch), episodes.trajectories
        if "token_rewards" in episodes.batch:
            token_rewards = trajectories.at_written(trajectories.tokens("token_rewards"))
            punished = episodes.spread(self.own_outcome(episodes.batch))
            return token_rewards + trajectories.at_last_token(punished), outcome
        return trajectories.at_last_token(episodes.at_end(outcome)) + episodes.at_calls, outcome

    def _kl_penalty(self, responses: Responses) -> tuple[Tensor, dict[str, float]]:
        """`[R]` what the reward loses, and the measured KL; moves the adaptive coefficient."""
        nothing = torch.zeros(len(responses.sequence), dtype=torch.float64)
        if self.kl_in == "none" or not responses.rows:
            return nothing, {}
        if "old_log_probs" not in responses.batch:
            raise DataError("KL to the reference needs 'log_probs' or 'rollout_log_probs' of the policy in the batch")
        estimate = self.token_kl(responses.tokens("old_log_probs"), responses.tokens("ref_log_probs"))
        estimate = torch.where(responses.written, estimate, 0.0)
        kl = float((responses.sum(estimate) / responses.sum(responses.written).clamp(min=1)).mean())
        coefficient = self._kl_coef
        if self.kl_target is not None:
            self._kl_coef = adapted(coefficient, kl, responses.rows, self.kl_target, self.kl_horizon)
        return (coefficient * estimate if self.kl_in == "reward" else nothing), {"kl": kl, "kl_coef": coefficient}

    def _correct(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Off-policy correction between `rollout_log_probs` and `log_probs`, of the rows that have both."""
        if "log_probs" not in batch or "rollout_log_probs" not in batch:
            return batch, {}
        rows = batch.arrow("log_probs").is_valid().to_numpy(zero_copy_only=False).nonzero()[0].tolist()
        if len(rows) < len(batch) and self.rollout_rs is None:  # which is of all rows
            if not rows:
                return batch, {}
            corrected, metrics = self._correct(batch.take(rows))
            return batch.add(corrected.drop(batch.columns).among(rows, len(batch))), metrics
        responses = Responses(batch)
        trainer, engine = (responses.tokens(name) for name in ("log_probs", "rollout_log_probs"))
        log_ratio = correction.LogRatio(responses, trainer, engine)
        columns, weights = {}, None
        if self.rollout_is is not None and self.rollout_is != "ratio":
            weights = columns["rollout_is_weights"] = correction.importance_weights(
                log_ratio, self.rollout_is, self.rollout_is_threshold, self.rollout_is_lower, self.rollout_is_normalize
            )
        metrics = correction.mismatch(log_ratio, weights)
        if self.rollout_rs is not None:
            stay = correction.accepted(log_ratio, self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_lower)
            columns["loss_mask"] = (stay & responses.trained).to(torch.uint8)
            batch = batch.drop(["loss_mask"])
            rejected = (responses.written & ~stay).sum() / responses.written.sum().clamp(min=1)
            metrics["mismatch/rejected"] = float(rejected)
        return (Responses(batch).store(columns) if columns else batch), metrics


def _policy_metrics(x: LossInput, terms: PolicyTerms, loss: PolicyLoss) -> dict[str, Tensor | float]:
    """Means over the tokens that count in the computed rows of the mini-batch, as additive shares."""
    tokens = max(x.computed_tokens, 1)
    metrics: dict[str, Tensor | float] = {"policy/kl": -terms.log_ratio.detach().sum() / tokens}
    for name, where in (("policy/clip_fraction", loss.clipped), ("policy/clip_fraction_lower", loss.clipped_lower)):
        if where is not None:
            metrics[name] = (where & terms.active).sum(dtype=x.weights.dtype) / tokens
    if x.entropy is not None:
        metrics["policy/entropy"] = torch.where(terms.active, x.entropy.detach(), 0.0).sum() / tokens
    return metrics
