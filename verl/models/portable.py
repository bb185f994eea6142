"""A live model that can travel to another process: as its class, its configuration and its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.errors import ModelError
from verl.models.heads import ValueModel, width_of
from verl.models.lora import change_layers, layer_changes
from verl.weights.shard import Shard
from verl.weights.shards import load_model_shards, model_shards


class PortableModel:
    """Holds a transformers model or a `ValueModel`: in this process the model itself, where it is unpickled a new one
    that is equal in every weight."""

    def __init__(self, model: Any) -> None:
        self.model = model

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
