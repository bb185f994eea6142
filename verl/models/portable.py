"""Plain models out of live ones: one that can travel to another process, as its class, configuration and weights;
and one out of a model that its caller has wrapped for sharded training."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.errors import CheckpointError, ModelError
from verl.models.heads import ValueModel, width_of
from verl.models.lora import change_layers, layer_changes
from verl.weights.shard import Shard
from verl.weights.shards import load_model_shards, model_shards

# What wrappers put into the names of the parameters below them.
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


@dataclass(eq=False)
class PortableModel:
    """Holds a transformers model or a `ValueModel`: in this process the model itself, where it is unpickled a new one
    that is equal in every weight."""

    model: Any

    def __reduce__(self) -> tuple[Callable[..., PortableModel], tuple[Any, ...]]:
        return PortableModel.of_parts, (self.parts(),)

    def parts(self) -> dict[str, Any]:
        """What makes an equal model elsewhere: classes, values and tensors by name."""
        model = self.model
        is_value = isinstance(model, ValueModel)
        backbone = model.backbone if is_value else model
        return {
            "class": type(backbone),
            "config_class": type(backbone.config),
            "config": backbone.config.to_dict(),
            "dtype": backbone.dtype,
            # None: a language model; else a value head, with a bias or without.
            "head": None if not is_value else "plain" if model.score.bias is None else "bias",
            "layers": layer_changes(model),
            "trained": [name for name, weight in model.named_parameters() if weight.requires_grad],
            "weights": {shard.name: shard.tensor.detach().cpu() for shard in model_shards(model)},
        }

    @classmethod
    def of_parts(cls, parts: dict[str, Any]) -> PortableModel:
        """A new model, equal in every weight.

        Raises:
            ModelError: the class is not one of transformers' models.
        """
        kind = parts["class"]
        if not issubclass(kind, PreTrainedModel):
            raise ModelError(f"{kind.__name__} is no model of transformers")
        model: Any = kind._from_config(parts["config_class"].from_dict(parts["config"]), dtype=parts["dtype"])
        if parts["head"] is not None:
            bias = torch.zeros(1) if parts["head"] == "bias" else None
            model = ValueModel(model, (torch.zeros(1, width_of(model)), bias))
        change_layers(model, parts["layers"])
        load_model_shards(model, (Shard.whole(*item) for item in parts["weights"].items()))
        names = set(parts["trained"])
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in names)
        return cls(model.eval())


def empty_copy(model: Any, device: Any) -> Any:
    """A copy of a model with uninitialised parameters on `device`; on "meta" they take no memory."""
    # As the memo of deepcopy, which takes what stands for an object there instead of copying it.
    copies = {
        id(weight): torch.nn.Parameter(torch.empty_like(weight, device=device), requires_grad=weight.requires_grad)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, copies)


def unwrapped(model: Any, *, together: bool = True) -> Any:
    """The model without its wrapper.

    `torch.compile`: the model that was compiled. `FullyShardedDataParallel` (either `use_orig_params`, layers wrapped
    or not) and `fully_shard`: a plain copy with the same class, configuration, weights, dtypes and frozen weights.
    Their weights are gathered, so all ranks over which the model is sharded call this together. The copy is trained in
    this project's own layout: the wrapped model does not change, and an optimizer over its parameters does not fit.

    `PeftModel`: the transformers model within, which has the adapters in its layers.

    Args:
        together: whether all ranks of the job call this.

    Raises:
        ModelError: the model is under `DistributedDataParallel` or `DataParallel`, is sharded over ranks that do not
            call this, is not the model that its configuration describes, or has several adapters or learned prompts.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ModelError(f"the model is wrapped as {type(model).__name__}: give its .module")
    model = _without_peft(getattr(model, "_orig_mod", model))  # of torch.compile, over the same weights
    # Importing FSDP takes a second; a sharded model needs an initialised process group, others need not wait.
    if not isinstance(model, nn.Module) or not dist.is_available() or not dist.is_initialized():
        return model
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    modules = [*model.modules()]
    if not any(isinstance(module, FullyShardedDataParallel | FSDPModule) for module in modules):
        return model
    if dist.get_world_size() > 1 and not together:
        raise ModelError(
            "the model is sharded over several ranks, and after the first call only rank 0 runs the script: wrap it, "
            "and give it to its handle, before the first call"
        )
    inner = model.module if isinstance(model, FullyShardedDataParallel) else model
    # fully_shard gives a module a class of its own, derived from FSDPModule and from the one that it had.
    cls: Any = next(base for base in type(inner).__mro__ if not issubclass(base, FSDPModule))
    if not hasattr(cls, "_from_config"):
        raise ModelError(f"{cls.__name__} is no language model of transformers: give an AutoModelForCausalLM")
    with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.random.fork_rng():
        # Every parameter, whole, by its name without wrappers; tied ones under each name.
        weights: dict[str, Any] = {
            _WRAPPERS.sub("", name): w for name, w in model.named_parameters(remove_duplicate=False)
        }
        cut = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
        weights |= {n: w.full_tensor().detach().requires_grad_(w.requires_grad) for n, w in cut.items()}
        plain = cls._from_config(inner.config, dtype=inner.dtype)
        change_layers(plain, layer_changes(inner))
        return _filled(plain, weights, inner)


def _without_peft(model: Any) -> Any:
    """The transformers model within a `PeftModel`; any other model as it is."""
    base = getattr(model, "get_base_model", None)
    if not callable(base):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(
            "prompt and prefix tuning put learned states before every prompt, which this does not compute: "
            "use adapters of weights (LoRA)"
        )
    if len(names := [*getattr(model, "peft_config", {})]) > 1:
        raise ModelError(f"the model has several adapters ({', '.join(names)}): merge or delete all but one")
    inner = base()
    inner._hf_peft_config_loaded = True  # its own `save_pretrained` writes the adapters
    return inner


def _filled(plain: Any, weights: dict[str, Any], inner: Any) -> Any:
    for name, weight in plain.named_parameters():
        if name in weights:  # a missing one is an error of the load below
            weight.data = weight.data.to(weights[name].device, weights[name].dtype)
            weight.requires_grad_(weights[name].requires_grad)
    buffers = {_WRAPPERS.sub("", name): buffer for name, buffer in inner.named_buffers()}
    for name, buffer in plain.named_buffers():
        buffer.data = buffers[name].detach().clone()
    persistent = {name: buffers[name] for name in plain.state_dict() if name in buffers}
    try:
        load_model_shards(plain, (Shard.whole(*item) for item in (weights | persistent).items()))
    except CheckpointError as error:
        raise ModelError(f"the wrapped model is not what its configuration says: {error}") from error
    plain.generation_config = inner.generation_config
    return plain.eval()
