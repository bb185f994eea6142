"""A live model that can travel to another process: as its class, its configuration and its weights in safetensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save

from verl.models.heads import ValueModel, width_of
from verl.models.shards import load_model_shards, model_shards
from verl.shard import Shard


class PortableModel:
    """Holds a transformers model or a `ValueModel`. In this process it is that very model; where it is unpickled it is
    a new one, equal in every weight."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Callable[..., PortableModel], tuple[Any, ...]]:
        model = self.model
        backbone = model.backbone if isinstance(model, ValueModel) else model
        has_bias = isinstance(model, ValueModel) and model.score.bias is not None
        weights = save({shard.name: shard.tensor.cpu().contiguous() for shard in model_shards(model)})
        kind = ("value", has_bias) if isinstance(model, ValueModel) else ("causal", False)
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        return _rebuilt, (type(backbone), backbone.config, str(backbone.dtype), kind, trained, weights)


def _rebuilt(
    cls: Any, config: Any, dtype: str, kind: tuple[str, bool], trained: list[str], weights: bytes
) -> PortableModel:
    model = cls._from_config(config, dtype=getattr(torch, dtype.removeprefix("torch.")))
    if kind[0] == "value":
        model = ValueModel(model, (torch.zeros(1, width_of(model)), torch.zeros(1) if kind[1] else None))
    load_model_shards(model, (Shard.whole(name, tensor) for name, tensor in load(weights).items()))
    names = set(trained)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in names)
    return PortableModel(model.eval())
