"""Shards of weights on their way into vLLM's model, in a worker of vLLM's.

They are put together, and loaded by vLLM's own loaders, one whole weight at a time. vLLM keeps the weights of a layer
until it has them all, and copies them into the tensors that it computes with, fused, packed or quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from verl.weights.shard import Shard

_HEAD = "lm_head.weight"


class WeightSink:
    """A model of vLLM's that takes policy versions, one after the other, in shards that may be cut anyhow. The shards
    of one weight, and the weights of one layer, should come one after the other: they are kept until it is whole."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self._model, self._config = model, config

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a version; one that was not ended is given up."""
        # Modules that await weights get the tensors that they compute with, as they are.
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.load_numel = info.load_numel_total = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self._model, self._config)
        initialize_layerwise_reload(self._model)
        self._expected = {name for name, _ in self._model.named_parameters()}
        self._loaded: set[str] = set()
        #: Weights that are not whole, and how many of their elements are missing.
        self._parts: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}
        self._head: Tensor | None = None

    @torch.no_grad()
    def take(self, shard: Shard, tied: Sequence[str]) -> None:
        """Load a weight, under further names where it is tied, or keep the shard until its weight is whole."""
        name, tensor = shard.name, shard.tensor
        if not shard.is_whole:
            if name not in self._parts:
                self._parts[name] = tensor.new_empty(shard.global_shape)
                self._left[name] = self._parts[name].numel()
            shard.slice.of(self._parts[name]).copy_(tensor)
            self._left[name] -= tensor.numel()
            if self._left[name]:
                return
            tensor = self._parts.pop(name)
        if _HEAD in (name, *tied):  # some columns of it are read back later
            self._columns = sorted({0, tensor.shape[1] // 3, tensor.shape[1] - 1})
            self._head = tensor[:, self._columns]
        model: Any = self._model
        loads = model.load_weights((each, tensor) for each in (name, *tied))
        self._loaded |= self._expected if loads is None else set(loads)

    @torch.no_grad()
    def end(self) -> None:
        """End the version.

        Raises:
            ValueError: a weight did not come, or not whole; the output layer has other values than came.
        """
        if lacking := sorted({*self._parts, *self._expected - self._loaded}):
            raise ValueError(f"{len(lacking)} weights of the model did not come, such as {lacking[0]}")
        finalize_layerwise_reload(self._model, self._config)
        if self._head is not None:
            _check_head(self._model, self._head, self._columns)


def _check_head(model: nn.Module, sent: Tensor, columns: Sequence[int]) -> None:
    """Read columns of the output layer back by multiplying unit vectors, which is exact: a layer with a packed copy (as
    a tied one on CPU) might otherwise keep old weights unnoticed.

    Args:
        sent: these columns, as they came.
    """
    head: Any = getattr(model, "lm_head", None)
    method: Any = getattr(head, "quant_method", None)
    if head is None or "Unquantized" not in type(method).__name__:
        return
    width = head.weight.shape[1]
    units = torch.zeros(len(columns), width, dtype=head.weight.dtype, device=head.weight.device)
    units[torch.arange(len(columns)), torch.tensor(columns)] = 1
    served = method.apply(head, units, bias=None)
    start, end = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    if not torch.equal(served[:, : end - start], sent[start:end].t().to(served)):
        raise ValueError("the output layer has other weights than those that came")
