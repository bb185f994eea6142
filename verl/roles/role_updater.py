"""An `Updater` by the words of some scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl._base.checked import checked
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.layouts import enable_hybrid_engine
from verl.roles.updater import Updater


class PPORoleUpdater(Updater):
    """`Updater("ppo", ...)` by the words of some scripts.

    Args:
        model: the policy and its value model: `(actor, critic)`, a mapping or an object with `actor` and `critic`; or
            an actor alone, whose critic is made from it.
        engine: "hybrid": `enable_hybrid_engine` for the policy; None: as it is.
        overlap_comm: of that engine.
        **options: of PPO.

    Raises:
        ConfigError: `model` has another form; no engine has that name, or this actor cannot use it.
    """

    @checked
    def __init__(
        self, model: Any, engine: str | None = None, *, overlap_comm: bool | None = None, **options: Any
    ) -> None:
        actor, critic = model, None
        if isinstance(model, Mapping):
            actor, critic = model.get("actor"), model.get("critic")
        elif isinstance(model, tuple | list):
            actor, critic = model if len(model) == 2 else (None, None)
        elif not isinstance(model, Actor):
            actor, critic = getattr(model, "actor", None), getattr(model, "critic", None)
        if not isinstance(actor, Actor) or not isinstance(critic, Critic | None):
            raise ConfigError(
                f"PPORoleUpdater: model is an actor and its critic, such as (actor, critic), not {type(model).__name__}"
            )
        super().__init__("ppo", actor=actor, critic=critic, **options)
        if engine not in (None, "hybrid"):
            raise ConfigError(f"PPORoleUpdater: no engine is called '{engine}': give 'hybrid', or leave it out")
        if engine is None and overlap_comm is not None:
            raise ConfigError("PPORoleUpdater: overlap_comm is of the hybrid engine: give engine='hybrid', too")
        if engine == "hybrid":
            enable_hybrid_engine(actor, overlap_comm=overlap_comm)
