"""The reference policy of an actor."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from verl._host.ranks import registry
from verl.errors import ConfigError, ModelError
from verl.models.heads import ValueModel, score_model
from verl.models.loading import load_model
from verl.models.portable import unwrapped
from verl.models.source import ModelFiles
from verl.rollout.hf import StartingEngine
from verl.weights.shard import Shard, checksum
from verl.weights.shards import model_shards

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from verl.roles.actor import Actor


class Reference:
    """A frozen copy of the actor as it was, another model, or the actor without its adapters.

    Args:
        first: what the reference of adapters reads besides their base, see `verl.models.lora.reference_weights`.

    Attributes:
        model: None before it is frozen, and where it is the actor without its adapters.
        files: what workers in other processes read it from; the model has no weights here then.
    """

    model: PreTrainedModel | None = None
    files: ModelFiles | None = None
    _is_other = False

    def __init__(self, first: dict[str, Tensor]) -> None:
        self._first = first
        self._digest = checksum([Shard.whole(*item) for item in first.items()]) if first else None

    def freeze(self, actor: Actor, model: Any, dtype: str | None) -> None:
        """See `Actor.make_reference`."""
        files = None
        if not actor.controller.is_local and dtype != "int4":
            files = ModelFiles(model, "causal", dtype or "auto") if isinstance(model, str) else None  # type: ignore[arg-type]
            if model is None and actor.policy_id == actor.first_id:
                files = actor.files
        self.files, self._is_other = files, model is not None
        if files is not None:
            self.model = files.on_meta()
        elif isinstance(model, str):
            self.model = load_model(model, dtype=dtype or "auto")
        else:
            self.model = copy.deepcopy(actor.present_model()) if model is None else live_model(model)
            if dtype == "int4":
                from verl.models.int4 import to_int4

                to_int4(self.model)
        registry.add("Actor", reference=self.model)

    @property
    def digest(self) -> str | None:
        """SHA-256 of its weights; None without a reference."""
        if self._digest is None and self.model is not None:
            self._digest = checksum(model_shards(self.model) if self.files is None else self.files.stream())
        return self._digest

    def starting_engine(self, actor: Actor) -> StartingEngine:
        """An engine with its weights, for episodes that sample from the policy before training.

        Raises:
            ConfigError: they are not in this process, or are another model's.
            ModelError: the actor has been updated without a reference.
        """
        remedy = "start a server of the starting weights, and give its address in the place of 'start'"
        if not actor.controller.is_local:
            raise ConfigError(f"models: 'start' is for an actor in one process, and this one has several: {remedy}")
        actor.make_reference()
        if self._is_other:
            raise ConfigError(f"models: 'start' is the reference policy, which is another model here: {remedy}")
        options = actor.rollout_options
        return StartingEngine(
            self.model or actor.modules, self._first, tokenizer=actor.tokenizer, eos_token_ids=actor.ends,
            seed=options.seed, max_batch=options.max_num_seqs,
        )  # fmt: skip


def live_model(model: Any, head: str = "lm") -> Any:
    """A caller's model without its wrapper, under the head that is trained.

    Raises:
        ModelError: its wrapper cannot be taken off, or it is no model of transformers.
    """
    if not isinstance(model, ValueModel):
        model = unwrapped(model, together=not registry.is_closed)
        if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
            name = type(model).__name__
            raise ModelError(f"{name} is no language model of transformers: give an AutoModelForCausalLM")
    return model if head == "lm" else score_model(model)
