"""Actors under the names of engines of generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from verl._base.checked import checked
from verl._base.record import Count
from verl.cluster.controller import Controller
from verl.errors import ModelError
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.workers import BuiltWorker

if TYPE_CHECKING:
    from verl.keywords import ActorArguments, BuiltArguments


class VLLMActor(Actor):
    """An actor whose responses vLLM samples, in this process.

    Args:
        model_name: directory or hub name of the model.
        tokenizer: as of `Actor`.
        **options: passed to `Actor`, such as `tensor_parallel_size` and `max_num_seqs`.
    """

    def __init__(self, model_name: Any, tokenizer: Any = None, **options: Unpack[ActorArguments]) -> None:
        options.setdefault("rollout", "vllm")
        super().__init__(model_name, tokenizer, **options)


VLLMActorModel = VLLMActor


@checked
def get_actor_critic(
    model_name: str, use_vllm: bool = False, device_map: Any = None, **options: Unpack[ActorArguments]
) -> tuple[Actor, Critic]:
    """A policy and a value model, both from the model of this name.

    Args:
        use_vllm: vLLM samples the responses.
        device_map: their devices, see `DeviceMesh`; None or "auto": as `Actor` and `Critic` choose.
        **options: of the actor.
    """
    placement = None if device_map in (None, "auto") else Controller.of(device_map)
    make = VLLMActor if use_vllm else Actor
    # What is given twice Python refuses, as mypy does.
    actor = make(model_name, placement=placement, **options)  # type: ignore[misc]
    return actor, Critic(model_name, placement=placement)


class HuggingFaceWorker(Actor):
    """An actor that samples with transformers' forward and cache; takes the options of `Actor`."""

    def __init__(self, model_name: Any, tokenizer: Any = None, **options: Unpack[ActorArguments]) -> None:
        options.setdefault("rollout", "hf")
        super().__init__(model_name, tokenizer, **options)


class HfModelAdapter(HuggingFaceWorker):
    """An actor with the caller's model, which is one of transformers or has the same interface, and the caller's
    tokenizer.

    Raises:
        ModelError: `forward`, `generate` or `config` is missing, by name.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **options: Unpack[ActorArguments]) -> None:
        missing = [name for name in ("forward", "generate", "config") if not hasattr(model, name)]
        if missing:
            raise ModelError(
                f"a {type(model).__name__} is no causal language model of transformers: it has no {', '.join(missing)}"
            )
        super().__init__(model, tokenizer, **options)


class ActorRolloutRefWorker(BuiltWorker):
    """Actor, rollout and reference policy over one model; the reference is the model as it is now.

    Args:
        model_path: directory or hub name of the model.
        max_batch_size: sequences that are generated at a time.
        rollout_backend: "vllm", "embedded", "hf", or "FILE.py:CLASS".
        **options: passed to `BuiltWorker`, such as `tensor_parallel_size`, the ranks that share one copy of the model
            in generation.
    """

    @checked
    def __init__(
        self,
        model_path: Any,
        tokenizer: Any = None,
        *,
        max_batch_size: Count = 256,
        rollout_backend: Any = "vllm",
        **options: Unpack[BuiltArguments],
    ) -> None:
        engine: Any = {"rollout": rollout_backend, "max_num_seqs": max_batch_size}
        super().__init__(model_path, tokenizer, **engine, **options)
        self.make_reference()
