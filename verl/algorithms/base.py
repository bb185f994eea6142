"""The contract of an algorithm: what is computed from a batch, and the loss. Nothing else knows an algorithm.

A trainer asks it which models it needs (`roles`), hands it the whole batch once (`prepare`), cuts the result
into mini-batches, asks for their aggregation weights (`token_weights`), and hands micro-batches of those to the
loss. Whatever couples rows - baselines, whitening, KTO's KL - belongs into `prepare`; a loss is then additive
over micro-batches and ranks, and no split can change a gradient.

Losses may run in other processes than `prepare`: what they need travels in the batch, never in `self`
(options are fixed and may be read).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias, dataclass_transform, get_type_hints

import torch
from torch import Tensor

from verl._base.checked import hinted, validated
from verl._base.names import check_known
from verl._base.record import Positive
from verl.algorithms.advantages import group_centred, group_sums
from verl.algorithms.episodes import Episodes
from verl.algorithms.loss_terms import Loss, LossFn, LossInput, LossNeeds
from verl.algorithms.losses import AggregationMode, aggregation_weights
from verl.algorithms.responses import Responses, numbers_of
from verl.batch import Batch
from verl.errors import ConfigError, DataError

__all__ = ["BaseAlgorithm", "Loss", "LossInput"]

logger = logging.getLogger(__name__)

#: Of an algorithm and a micro-batch additive metrics, as of `Loss`.
FurtherMetrics: TypeAlias = "Callable[[BaseAlgorithm, LossInput], Mapping[str, Tensor | float]]"

#: `unread` of a loss that is a mean over rows or pairs.
NOT_BY_TOKEN = {"loss_agg_mode": "its loss is a mean over rows, not over tokens"}

#: What a loss with a ratio to the policy that the batch came from reads.
ACTOR_COLUMNS: tuple[str, ...] = ("old_log_probs", "advantages")
#: Models an algorithm may ask for. Trained ones: actor, critic, cost_critic.
ROLES = frozenset({"actor", "critic", "reference", "reward", "cost", "cost_critic"})
#: The loss of each trained role, and the methods that it is made of.
_LOSSES = {
    "actor": ("compute_loss", "policy_loss", "ratio", "importance"),
    "critic": ("compute_critic_loss",),
    "cost_critic": ("compute_cost_critic_loss",),
}


@dataclass_transform(kw_only_default=True, eq_default=False)
@dataclass(kw_only=True, eq=False)
class BaseAlgorithm(ABC):
    """Subclass, implement `compute_loss`, and choose the class by itself or by a registered name.

    Annotated attributes of a subclass are its options: keyword arguments, checked by their type and its bounds
    (`Annotated[float, pydantic.Field(gt=0)]`). (Subclasses become dataclasses by themselves.) By default `prepare`
    drops rows whose reward abstained and adds the columns `advantages` (reward minus the mean of its group) and
    `old_log_probs`; override it for more.

    Class attributes:
        online: samples come from a rollout of the current policy (False: from a data set).
        coupled: rows of one group meet in the loss, so a group is never cut.
        head: "lm", or "score" to train a model with one score a row.
        samples_per_prompt: what suits it, unless the user says otherwise.
        greedy_baseline: each prompt gets one greedy sample in addition to the others in the same rollout, marked by the
            row column `baseline`; `prepare` takes it out.
        needs_log_probs: the trainer's own `log_probs` must be a column before `prepare`, whichever engine sampled.
        needs_constraint: samples come under one, an episode of the task's or the actor's.
        measures: roles out of "reward" and "cost" that it may be given, is measured by, and does not learn from.
        unread: options that its loss never reads, and why; see `why_unread`.
        read_with: option -> another one, without which it is not read, and the values of that which go with it (none:
            any that is set). A subclass adds its own to its bases'.
        no_gradient_at_zero: a statement about the losses of the class that sets it: a token whose weight or whose
            advantage is 0 has a gradient of exactly 0, whatever the model predicts. Rows of such tokens alone need not
            be computed. A subclass that overrides a loss (`compute_loss`, `policy_loss`, `ratio`, `importance`; of
            critics `compute_critic_loss`, `compute_cost_critic_loss`) has to state it again.
    """

    name = ""
    online = True
    coupled = False
    head: ClassVar[Literal["lm", "score"]] = "lm"
    samples_per_prompt = 8
    greedy_baseline = False
    needs_log_probs = False
    needs_constraint = False
    measures: ClassVar[frozenset[str]] = frozenset()
    unread: ClassVar[Mapping[str, str]] = {}
    read_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "loss_scale_factor": ("loss_agg_mode", "seq-mean-token-sum-norm")
    }
    no_gradient_at_zero = False

    #: Models it needs, out of `ROLES`.
    roles = frozenset({"actor", "reward"})
    #: Columns that `compute_loss` reads; those the batch lacks are left out of `x.columns`.
    loss_columns = ACTOR_COLUMNS
    #: Whether `compute_loss` reads `x.entropy`.
    needs_entropy = False
    #: Whether it learns from comparing the samples of one prompt, so that one sample alone says nothing.
    needs_groups = False
    #: The attributes that change from batch to batch, by their names in `state_dict`: numbers, or lists of them.
    _state: ClassVar[Mapping[str, str]] = {}
    #: Whether the only step on the policy's own samples, too, reads the `old_log_probs` of `prepare`.
    keeps_old_log_probs = False

    loss_agg_mode: AggregationMode = "token-mean"
    loss_scale_factor: Positive | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.read_with = {**super(cls, cls).read_with, **cls.read_with}  # type: ignore[misc]  # of the next base
        hinted(dataclass(kw_only=True, eq=False)(cls))

    def __post_init__(self) -> None:
        label = self.name or type(self).__name__
        hints = _option_types(type(self))
        for option, value in validated(label, hints, {name: getattr(self, name) for name in hints}).items():
            setattr(self, option, value)
        for field in fields(self):
            if reason := self.why_unread(field.name):
                value = getattr(self, field.name)
                if value is not None and value != field.default:  # neither asks for anything
                    raise ConfigError(
                        f"algorithm '{label}' does not read the option '{field.name}' ({value!r}): {reason}"
                    )
        #: Metrics of the actor's micro-batches beside the loss's own, by a function that a module has under its name.
        self.further_metrics: FurtherMetrics | None = None
        #: Whether a batch used for more than one optimizer step needs `log_probs` or `rollout_log_probs`.
        self.needs_old_log_probs = "old_log_probs" in self.loss_columns
        #: The name of an option, if set, that rewards or punishes responses besides the given rewards.
        self.own_rewards: str | None = None
        check_known(f"algorithm '{label}' asks for an unknown role", self.roles, ROLES)
        if "actor" not in self.roles:
            raise ConfigError(f"algorithm '{label}': roles must name 'actor', the model it trains")
        if self.head not in ("lm", "score"):
            raise ConfigError(f"algorithm '{label}': head must be 'lm' or 'score', got '{self.head}'")

    def why_unread(self, option: str) -> str | None:
        """Why an option changes nothing, as the others are: one that is given all the same is refused; None: it is
        read."""
        if option in self.unread or option not in self.read_with:
            return self.unread.get(option)
        other, *values = self.read_with[option]
        value = getattr(self, other)
        if value in values or (value and not values):
            return self.why_unread(other)
        wanted = " or ".join(f"{other}={value!r}" for value in values) or other
        return f"it is for {wanted}: set that, or leave it out"

    def check_samples(self, n: int) -> None:
        """Raises ConfigError where `n` samples a prompt leave the algorithm nothing to compare."""
        if self.online and self.needs_groups and n < 2:
            raise ConfigError(
                f"algorithm '{self.name or type(self).__name__}' compares the samples of one prompt and n={n} leaves "
                "nothing to compare: set n to 2 or more (in settings actor_rollout_ref.rollout.n), or choose an "
                "algorithm with another baseline"
            )

    def extend(self, batch: Batch) -> Batch:
        """The rows that models read, before any does: with labels made of rewards, and rows that only statistics need
        (KTO's mismatched pairs). An extended batch is returned as it is."""
        return batch

    def prompt_prefixes(self, batch: Batch) -> Sequence[str] | None:
        """A text before each prompt as the policy reads it, which rewards do not see. Asked of prompts before responses
        are sampled, and of samples that `prepare` made before they are learned from. None: the prompts as they are."""
        return None

    def keep(self, batch: Batch) -> list[bool] | None:
        """Rows worth training on, once rewards are there; None: all. The trainer samples more in their place."""
        return None

    def needs(self, batch: Batch, role: str) -> list[bool] | None:
        """Scored samples for which `prepare`, and an update that skips rows of advantage 0, read a model's outputs;
        None: all. For the role "actor" these are the log-probs before the update, which are null in other rows."""
        return None

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """All detached statistics of the whole batch, as new columns, and metrics.

        Rows that do not train (abstained, greedy baselines) are gone from the result, which may have no rows.

        Raises:
            DataError: a column that the algorithm reads is missing.
        """
        if "reward" not in self.roles:
            return batch, {}
        batch, metrics = drop_abstained(batch, by_group=True)
        episodes = Episodes(batch)
        responses = episodes.responses
        rewards = episodes.batch.tensor("reward", torch.float64)
        advantages = group_centred(rewards, responses.groups)[responses.sequence]
        return old_log_probs(episodes.trajectories.store({"advantages": advantages})), metrics

    def token_weights(self, batch: Batch) -> Tensor:
        """`[R]`: aggregation weight of each response token of a mini-batch (all ranks together), see `losses`. A
        sequence is a response, or all trained tokens of an episode."""
        responses = Responses(batch)
        sequence, scale = responses.sequence, self.loss_scale_factor
        if "episode" in batch:
            # All trajectories of an episode are one sequence, so that an episode weighs the same however it was split.
            sequence = numbers_of(batch.group_indices("episode"), responses.rows)[sequence]
            longest = torch.bincount(sequence[responses.trained], minlength=1).max()
            scale = scale or float(longest.clamp(min=1))
        return aggregation_weights(responses.trained, sequence, responses.rows, self.loss_agg_mode, scale)

    def needed_log_probs(self, x: LossInput) -> Tensor:
        """`x.log_probs`, `[R]`.

        Raises:
            DataError: the model has no language-model head.
        """
        if x.log_probs is None:
            raise DataError(f"the loss of '{self.name}' needs log-probs: train it with a language-model head")
        return x.log_probs

    @abstractmethod
    def compute_loss(self, x: LossInput) -> Loss:
        """Loss of one micro-batch, additive: a sum over what is in `x` over counts of the whole mini-batch."""

    def objective(self, role: str) -> RoleObjective:
        """The loss that the update of a trained role minimises: `compute_loss` of the actor, `compute_critic_loss(x)`
        of the critic, from `x.values` and the columns `values` and `returns`, and `compute_cost_critic_loss(x)` of the
        cost critic, whose columns are `cost_values` and `cost_returns`.

        Raises:
            ConfigError: the algorithm does not train that role.
        """
        if role not in self.roles or not hasattr(self, _LOSSES.get(role, ("",))[0]):
            raise ConfigError(f"algorithm '{self.name or type(self).__name__}' does not train a '{role}'")
        return RoleObjective(self, role)

    def state_dict(self) -> dict[str, Any]:
        """What changes from batch to batch (KL coefficient, lambda), as JSON."""
        return {name: getattr(self, attribute) for name, attribute in self._state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`.

        Raises:
            KeyError, ValueError: a value is missing, or is not a number.
        """
        for name, attribute in self._state.items():
            numbers = state[name] if isinstance(getattr(self, attribute), list) else [state[name]]
            if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
                raise ValueError(f"the state '{name}' of algorithm '{self.name}' must be numbers, not {state[name]!r}")
            setattr(self, attribute, state[name])


@dataclass(eq=False)
class RoleObjective:
    """What an update of one role needs to know of an algorithm. Workers get it by value and never look one up by name.

    Attributes:
        further_metrics: in addition to the algorithm's own, measured in the forward pass of the update; None: none.
        token_weights: the algorithm's.
        by_token: whether the loss is a weighted sum over tokens, so that nothing is learned where all weights are 0.
        loss_needs: the inputs of this role's loss. `no_gradient_at_zero`: the algorithm states it of that loss, and it
            is by token.
    """

    algorithm: BaseAlgorithm
    role: str

    def __post_init__(self) -> None:
        algorithm, is_actor = self.algorithm, self.role == "actor"
        prefix = self.role.removesuffix("critic")
        self.further_metrics = algorithm.further_metrics if is_actor else None
        self._loss: LossFn = getattr(algorithm, _LOSSES[self.role][0])
        self.token_weights = algorithm.token_weights
        self.by_token = not is_actor or not (algorithm.coupled or algorithm.head == "score")
        self.loss_needs = LossNeeds(
            columns=algorithm.loss_columns if is_actor else (f"{prefix}values", f"{prefix}returns"),
            entropy=is_actor and algorithm.needs_entropy,
            statistics=self.further_metrics is not None,
            coupled=is_actor and algorithm.coupled,
            no_gradient_at_zero=self.by_token and states(algorithm, "no_gradient_at_zero", _LOSSES[self.role]),
        )

    def compute_loss(self, x: LossInput) -> Loss:
        loss = self._loss(x)
        if self.further_metrics is None:
            return loss
        with torch.no_grad():
            further = self.further_metrics(self.algorithm, x)
        return replace(loss, metrics={**loss.metrics, **further})


def states(algorithm: BaseAlgorithm, statement: str, methods: Collection[str]) -> bool:
    """Whether a class attribute that is a statement about some methods is true of these methods: a class that overrides
    one of them has lost the statement, unless it repeats it."""
    for names in (vars(algorithm), *map(vars, type(algorithm).__mro__)):
        if statement in names:
            return bool(names[statement])
        if not names.keys().isdisjoint(methods):
            return False
    return False


def drop_abstained(
    batch: Batch, columns: tuple[str, ...] = ("reward",), *, by_group: bool = False
) -> tuple[Batch, dict[str, float]]:
    """Rows of episodes that are `present` (of single turns, each is one), and how many are not (`abstained`).

    A group whose episodes all abstained is gone; groups that lost some go on with the others.

    Args:
        by_group: the baseline is the group. The last episode left of a larger group has no baseline: it is dropped,
            too, and counted as `left_alone`.

    Raises:
        DataError: there is no such column.
    """
    episodes = Episodes(batch)
    good = present(episodes.batch, columns)
    metrics = {"abstained": float(episodes.count(~good))}
    if by_group:
        alone = good & (group_sums(good.double(), episodes.responses.groups) == 1) & (episodes.planned > 1)
        if alone.any():
            metrics["left_alone"] = float(episodes.count(alone))
            logger.warning(
                "%d of %d samples are left out of the update: all others of their prompt abstained, which leaves "
                "nothing to compare them with", episodes.count(alone), batch.samples
            )  # fmt: skip
        good &= ~alone
    # A separate trajectory stays with its episode; its tokens count only if its own group has something to compare.
    stays, counts = good[episodes.whole][episodes.number], good[episodes.number]
    batch = batch if stays.all() else batch.filter(stays.tolist())
    if not (counts | ~stays).all():  # of what stands apart, with nothing to compare it with, no token is trained
        responses = Responses(batch)
        trained = responses.trained & counts[stays][responses.sequence]
        batch = Responses(batch.drop(["loss_mask"])).store({"loss_mask": trained.to(torch.uint8)})
    return batch, metrics


def present(batch: Batch, columns: tuple[str, ...] = ("reward",)) -> Tensor:
    """`[S]` bool: rows whose reward (all of these row columns) is a finite number, and so are all its `token_rewards`,
    where the batch has them.

    Raises:
        DataError: there is no such column.
    """
    good = torch.ones(len(batch), dtype=torch.bool)
    for column in columns:
        good &= batch.tensor(column, torch.float64).isfinite()
    if "token_rewards" in batch:
        responses = Responses(batch)
        good &= responses.sum(~responses.tokens("token_rewards").isfinite()) == 0
    return good


def old_log_probs(batch: Batch) -> Batch:
    """The batch with column `old_log_probs`: the trainer's `log_probs`, else the engine's, else nothing is added."""
    for name in ("log_probs", "rollout_log_probs"):
        if name in batch and "old_log_probs" not in batch:
            return batch.add({"old_log_probs": batch.arrow(name)})
    return batch


@cache
def _option_types(cls: type[BaseAlgorithm]) -> dict[str, Any]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # an annotation that only its own scope can resolve is not checked
        return {}
    return {field.name: hints[field.name] for field in fields(cls) if field.init}
