"""`Updater`: an algorithm bound to the models it trains, by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl._base.checked import checked
from verl._base.combinations import check
from verl._base.names import disjoint
from verl._host.ranks import registry
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.batch import Batch
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.roles.columns import add_rewards
from verl.roles.critic import Critic, critic_like
from verl.roles.reads import model_outputs, prepare, with_model_outputs

logger = logging.getLogger(__name__)


class Updater:
    """`Updater("ppo", actor=actor, critic=critic)`: one call prepares a scored batch and updates every model.

    Args:
        algorithm: a name, class or instance.
        actor: the policy.
        critic, cost_critic: value models; where the algorithm has one and None is given, it is made from the actor's.
            One that it has not is a warning, so that algorithms can be exchanged.
        **options: the algorithm's own.

    Raises:
        ConfigError: no such algorithm or option; actor and critic are over one model; training settings of one that do
            not go together.
    """

    @checked
    def __init__(
        self,
        algorithm: str | BaseAlgorithm,
        *,
        actor: Actor,
        critic: Critic | None = None,
        cost_critic: Critic | None = None,
        **options: Any,
    ) -> None:
        self.algorithm = make_algorithm(algorithm, **options)
        self.actor = actor
        #: Of one of several tasks that train the actor: what the names of its metrics begin with, and the factor of
        #: its loss.
        self.name, self.weight = "", 1.0
        registry.add("Updater", algorithm=self.algorithm)
        if actor.head != self.algorithm.head:
            raise ConfigError(
                f"algorithm '{self.algorithm.name}' trains a model with a head of kind '{self.algorithm.head}', this "
                f"actor's is '{actor.head}': make it with Actor(..., head='{self.algorithm.head}')"
            )
        handles = {"critic": critic, "cost_critic": cost_critic}
        if idle := [
            role for role, handle in handles.items() if handle is not None and role not in self.algorithm.roles
        ]:
            logger.warning(
                "algorithm '%s' has no %s: what is given is not used", self.algorithm.name, " or ".join(idle)
            )
        files = actor.files if actor.policy_id == actor.first_id else None
        #: Role -> its value model, for the value models that the algorithm has.
        self.critics = {
            # a copy of the actor's backbone, as it is now, under a new value head
            role: handle or critic_like(actor, files, actor.present_model)
            for role, handle in handles.items()
            if role in self.algorithm.roles
        }
        if not self.algorithm.online:  # what nobody sampled has no temperature
            actor.plan = replace(actor.plan, temperature=1.0)
        actor_weights = set(map(id, actor.modules.parameters()))
        for role, handle in self.critics.items():
            if not actor_weights.isdisjoint(map(id, handle.model.parameters())):
                raise ConfigError(
                    f"the {role} and the actor are over one model, so each would move the other's weights: leave the "
                    f"{role} out (it gets a copy), or give it a model of its own"
                )
            handle.role = role
            handle.actor_tokenizer = actor.tokenizer
        for model in (actor, *self.critics.values()):  # an optimizer would refuse it once samples have been paid for
            check(model.train_options.asked())
        if "reference" in self.algorithm.roles or actor.asks_start:  # which are there now, and not at a resume
            actor.make_reference()
        self.outputs = model_outputs(self.algorithm, actor, self.critics)

    def compute_log_probs_and_values(self, sequences: Batch) -> Batch:
        """Add the model outputs that the algorithm needs: columns of other models, and rows for statistics."""
        return with_model_outputs(self.algorithm, sequences, self.outputs)

    def prepare(self, samples: Batch, together: int | None = None) -> tuple[Batch, dict[str, float]]:
        """See `verl.roles.reads.prepare`."""
        return prepare(self.algorithm, self.actor, samples, together)

    def update(self, sequences: Batch, rewards: Any = None) -> dict[str, float]:
        """Update every model from scored sequences; `rewards` as in `Actor.update`, or already a column.

        For users' own loops: a trainer calls `verl.trainer.step.learn`, which takes several tasks."""
        batch = sequences if rewards is None else add_rewards(sequences, rewards)
        prepared, metrics = self.prepare(self.compute_log_probs_and_values(batch))
        of_roles = [role_metrics("actor", self.actor.train(prepared, self.algorithm))]
        for role, critic in self.critics.items():
            of_roles.append(role_metrics(role, critic.train(prepared, self.algorithm, role)))
        return disjoint(f"a metric of algorithm '{self.algorithm.name}'", metrics, *of_roles)

    __call__ = update

    def named(self, what: str) -> str:
        """A name, prefixed by the task's if there are several."""
        return f"{self.name}/{what}" if self.name else what

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics under the names that they have in a record."""
        return {self.named(name): value for name, value in metrics.items()}


def role_metrics(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of one role's update under its name: `loss` becomes `loss/<role>`, others likewise."""
    of_role = (
        "loss", "grad_norm", "lr", "update/steps", "update/skipped", "update/empty", "update/rows_left_out",
        "update/tokens_left_out", "update/tokens_shared", "update/tokens_flat",
    )  # fmt: skip
    return {f"{name}/{role}" if name in of_role else name: value for name, value in metrics.items()}
