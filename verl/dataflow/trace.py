"""A plain loop over calls, read as a graph: the loop's step is called once with stand-ins for its handles, which
compute nothing and note what is asked of them.

    def step(actor, reward_model, critic, prompts):
        sequences = actor.generate_sequences(prompts)
        rewards = reward_model.get_reward(sequences)
        values = critic.compute_values(sequences)
        actor.update(sequences, rewards, values)
        critic.update(sequences.add(values), rewards)

    pipeline = trace(step, actor, reward_model, critic)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.algorithms.default import usual_algorithm
from verl.dataflow.nodes import RolloutNode
from verl.dataflow.pipeline import RLDataPipeline
from verl.errors import ConfigError, nearest
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import as_sampling

#: Kind of handle -> its calls -> what they are given, and what they give.
_CALLS: dict[type, dict[str, tuple[tuple[str, ...], str]]] = {
    Actor: {
        "generate_sequences": (("prompts",), "sequences"),
        "compute_ref_log_probs": (("sequences",), "ref_log_probs"),
        "update": (("sequences", "reward"), ""),
    },
    Critic: {"compute_values": (("sequences",), "values"), "update": (("sequences", "reward"), "")},
    Reward: {"get_reward": (("sequences",), "reward")},
    Updater: {"update": (("sequences", "reward"), "")},
}
#: Keywords of calls that are columns.
_GIVEN = ("prompts", "sequences", "rewards", "values")


@dataclass(frozen=True)
class Columns:
    """What a call of a traced step returns: the names of columns, without numbers."""

    names: frozenset[str]

    def add(self, other: Columns) -> Columns:
        return Columns(self.names | other.names)

    def __getattr__(self, name: str) -> Any:
        raise self._no_numbers(f".{name}")

    def __getitem__(self, name: Any) -> Any:
        raise self._no_numbers(f"[{name!r}]")

    def __iter__(self) -> Any:
        raise self._no_numbers(" in a loop")

    def _no_numbers(self, use: str) -> ConfigError:
        return ConfigError(
            f"a traced step has no numbers yet, and reads {', '.join(sorted(self.names))}{use}: read them from the "
            "result of the pipeline's run"
        )


class _Notes:
    """What was asked of the handles of a step."""

    def __init__(self) -> None:
        #: (handle, call) -> the columns given, and keywords.
        self.calls: list[tuple[Any, str, frozenset[str], dict[str, Any]]] = []

    def of(self, kind: type, method: str) -> list[tuple[Any, frozenset[str], dict[str, Any]]]:
        return [(h, given, options) for h, v, given, options in self.calls if isinstance(h, kind) and v == method]


class _StandIn:
    """A handle whose calls are noted."""

    def __init__(self, handle: Any, notes: _Notes) -> None:
        self._handle, self._notes, self._kind = handle, notes, type(handle).__name__
        self._methods: dict[str, Any] = next((v for kind, v in _CALLS.items() if isinstance(handle, kind)), {})
        if not self._methods:
            raise ConfigError(f"a step is traced over an Actor, Critic, Reward or Updater, not a {self._kind}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.update(*args, **options)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in self._methods:
            raise ConfigError(f"a traced step cannot call '{method}' of {self._kind}: {nearest(method, self._methods)}")
        return partial(self._note, method)

    def _note(self, method: str, *args: Any, **options: Any) -> Any:
        columns = [*args, *(options.pop(name) for name in _GIVEN if name in options)]
        if any(not isinstance(given, Columns) for given in columns):
            raise ConfigError(
                f"{self._kind}.{method} of a traced step gets prompts, or what its other calls return, not {columns!r}"
            )
        wanted, gives = self._methods[method]
        given = frozenset[str]().union(*(given.names for given in columns))
        if lacking := sorted({*wanted} - given):
            raise ConfigError(f"{self._kind}.{method} of the traced step lacks {lacking}: it got {sorted(given)}")
        self._notes.calls.append((self._handle, method, given, options))
        return Columns(frozenset({gives})) if gives else {}


def trace(step: Callable[..., Any], *handles: Any) -> RLDataPipeline:
    """The pipeline of a plain loop's step; its `graph` is that of a `Trainer` over the same handles.

    Args:
        step: called as `step(*handles, prompts)`.
        handles: `Actor`, `Critic`, `Reward` or `Updater`.

    Raises:
        ConfigError: the step reads numbers, makes another call, leaves a model out that its algorithm trains, or
            trains one that the algorithm has not.
    """
    notes = _Notes()
    step(*(_StandIn(handle, notes) for handle in handles), Columns(frozenset({"prompts"})))
    sampled = notes.of(Actor, "generate_sequences")
    if len(sampled) != 1:
        raise ConfigError(f"a step samples once, this one calls generate_sequences {len(sampled)} times")
    ((actor, _, options),) = sampled
    n, params = options.pop("n", 1), as_sampling(options, actor.sampling)
    updater = _updater(notes, actor, n)
    learned = None if updater is None else updater.algorithm
    greedy = learned is not None and learned.greedy_baseline
    sampled_by = RolloutNode(actor, n=n, params=params, algorithm=learned, greedy_baseline=greedy)
    pipeline = RLDataPipeline().add_stage("rollout", sampled_by)
    for reward in dict.fromkeys(handle for handle, _, _ in notes.of(Reward, "get_reward")):
        pipeline.add_stage("reward", reward)
    return pipeline if updater is None else pipeline.add_stage("update", updater)


def _updater(notes: _Notes, actor: Actor, n: int) -> Updater | None:
    """What the updates of a step are together."""
    for updater, _, _ in notes.of(Updater, "update"):
        return updater  # type: ignore[no-any-return]
    updates, critics = notes.of(Actor, "update"), [critic for critic, _, _ in notes.of(Critic, "update")]
    if not updates:
        return None
    if updates[0][0] is not actor:
        raise ConfigError("the step samples from one actor and updates another")
    ((_, given, _), *_) = updates
    algorithm = actor.algorithm or usual_algorithm("values" in given, n > 1)
    if critics and "critic" not in algorithm.roles:
        raise ConfigError(f"algorithm '{algorithm.name}' has no critic, and the step updates one")
    if not critics and "critic" in algorithm.roles:
        raise ConfigError(f"algorithm '{algorithm.name}' trains a critic, which the step does not update")
    return Updater(algorithm, actor=actor, critic=critics[0] if critics else None)
