"""The stages of a graph that a user writes: each is a node or several, some by a registered name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from verl._base.checked import checked
from verl._base.names import give_name
from verl._base.record import Name
from verl.dataflow.graph import ANY, Node
from verl.dataflow.nodes import RewardNode, UpdateNode
from verl.errors import ConfigError, nearest
from verl.roles.actor import Actor
from verl.roles.reward import Reward
from verl.roles.updater import Updater

StageT = TypeVar("StageT", bound=Callable[..., Any])
_REGISTERED: dict[str, Any] = {}


@checked
def register_node(name: Name) -> Callable[[StageT], StageT]:
    """Decorator of a class of nodes (a subclass of `RewardNode`, or any with `as_node(name)`) that is made without
    arguments, or of a function that is a stage: graphs take it by this name. One of the same name and module replaces
    its earlier definition (a notebook cell run twice).

    Raises:
        ConfigError: it is neither, or the name belongs to another.
    """

    def register(stage: StageT) -> StageT:
        if inspect.isclass(stage) and not hasattr(stage, "as_node"):
            raise ConfigError(f"{stage.__name__} is no node: write a subclass of RewardNode, or as_node(self, name)")
        give_name(_REGISTERED, "node", name, stage)
        if inspect.isclass(stage):
            stage.name = name  # type: ignore[attr-defined]
        return stage

    return register


def make_stage(stage: Any) -> Any:
    """A stage, by its registered name, its class, or as it is.

    Raises:
        ConfigError: nothing is registered by that name, or the object cannot be a stage.
    """
    if isinstance(stage, str):
        if stage not in _REGISTERED:
            hint = nearest(stage, _REGISTERED)
            raise ConfigError(f"no node is called '{stage}': {hint} (register yours: @verl.register_node('{stage}'))")
        stage = _REGISTERED[stage]
    if inspect.isclass(stage) and hasattr(stage, "as_node"):
        stage = stage()
    if not (isinstance(stage, Actor | Reward | Node) or hasattr(stage, "as_node") or callable(stage)):
        raise ConfigError(f"a {type(stage).__name__} is no stage: give an Actor, Reward, Updater, node or function")
    return stage


def stage_nodes(name: str, stage: Any) -> list[Node]:
    """The nodes of a stage that is no actor: what is sampled of a prompt depends on the other stages."""
    if isinstance(stage, Reward):
        return [RewardNode(stage).as_node(name)]
    if isinstance(stage, Updater):
        return UpdateNode(stage).as_node(name)
    if isinstance(stage, Node):
        slot = "" if stage.slot == stage.name else stage.slot
        return [replace(stage, name=name, slot=slot)]
    if hasattr(stage, "as_node"):
        nodes = stage.as_node(name)
        return [nodes] if isinstance(nodes, Node) else list(nodes)
    if is_reward_function(stage):
        return [RewardNode(stage).as_node(name)]
    return [Node(name=name, run=stage, inputs=(ANY,), outputs=(ANY,))]


def check_none_updates(nodes: Iterable[Node]) -> None:
    """Raises ConfigError for a node of kind "update": a step updates by an `Updater`, and would not run it."""
    if updates := [node.name for node in nodes if node.kind == "update"]:
        raise ConfigError(f"node '{updates[0]}' is of kind 'update': give an Updater as a stage, or kind='batch'")


def is_reward_function(stage: Any) -> bool:
    """Whether a stage is a plain function and not one of a `batch`."""
    if isinstance(stage, Actor | Reward | Updater | Node) or hasattr(stage, "as_node"):
        return False
    return list(inspect.signature(stage).parameters) != ["batch"]


def make_stages(nodes: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    """Stages by name: of a mapping, or of names of registered nodes."""
    if isinstance(nodes, str):
        raise ConfigError(f"nodes are a list of names, or a mapping of names to stages, not the string '{nodes}'")
    named = nodes if isinstance(nodes, Mapping) else {name: name for name in nodes}
    return {name: make_stage(stage) for name, stage in named.items()}
