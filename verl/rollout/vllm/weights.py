"""Shards of weights on their way into vLLM's model, in a worker of vLLM's.

The first version is loaded by vLLM's own loaders, one whole weight at a time; what they copy to where is recorded. A
layer that computes with those very tensors gets later versions in place, shard by shard: a shard of a query matrix goes
to its rows of the fused one. What vLLM stores otherwise (packed for a CPU, quantised, experts) is loaded weight by
weight each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from verl.weights.shard import Shard
from verl.weights.shards import fill_block

_HEAD = "lm_head.weight"
#: Methods that compute with a layer's weights as they were loaded, on CPU with a packed copy.
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class BlockTarget(NamedTuple):
    """Where a block of a weight goes: the block begins at `offset`, and is a strided part of a module's tensor."""

    offset: tuple[int, ...]
    module: nn.Module
    tensor: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


class _Route(NamedTuple):
    """How a weight is loaded: the names of vLLM's parameters that it fills (None: it did not say), their modules, and
    where they go (None: not known)."""

    loads: frozenset[str] | None
    modules: frozenset[nn.Module]
    targets: tuple[BlockTarget, ...] | None


class WeightSink:
    """A model of vLLM's that takes policy versions, one after the other, in shards that may be cut anyhow.

    The shards of one weight should come one after the other: where they are not put in place, they are put together.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self._model, self._config = model, config
        #: Of the weights that are put in place, once a version was loaded.
        self._in_place: dict[str, _Route] = {}
        self._in_place_modules: set[nn.Module] = set()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a version; one that was not ended is given up."""
        _put_back(self._model, self._config)
        initialize_layerwise_reload(self._model)
        self._expected = {name for name, _ in self._model.named_parameters()}
        # By their storage: most are not allocated yet.
        self._owners = {
            tensor.untyped_storage()._cdata: (module, name, tensor)
            for module in self._model.modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        #: Parts that a loader has copied to; vLLM copies again once a layer is whole.
        self._filled: set[tuple[Any, ...]] = set()
        for module in self._in_place_modules:
            _put_back(module, self._config)
        self._routes: dict[str, _Route] = {}
        self._left: dict[str, int] = {}
        self._parts: dict[str, Tensor] = {}
        self._loaded: set[str] = set()
        self._head: Tensor | None = None

    @torch.no_grad()
    def take(self, shard: Shard) -> None:
        """Put a shard in place, or keep it until its weight is whole, and load that."""
        name, tensor = shard.name, shard.tensor
        self._left[name] = self._left.get(name, math.prod(shard.global_shape)) - tensor.numel()
        if name == _HEAD:
            self._sample_head(shard)
        if (route := self._in_place.get(name)) is not None:
            for block in route.targets or ():
                whole = getattr(block.module, block.tensor).data
                rows = torch.as_strided(whole, block.shape, block.stride, whole.storage_offset() + block.start)
                fill_block(block.offset, rows, shard)
            self._loaded |= route.loads or set()
            return
        if not shard.is_whole:
            part = self._parts.setdefault(name, tensor.new_empty(shard.global_shape))
            shard.slice.of(part).copy_(tensor)
            if self._left[name]:
                return
            tensor = self._parts.pop(name)
        with _Copies(tensor, self._owners, self._filled) as copies:
            model: Any = self._model
            loads = model.load_weights([(name, tensor)])
        if loads is None:
            self._loaded |= self._expected
            self._routes[name] = _Route(None, frozenset(self._model.modules()), None)
            return
        self._loaded |= set(loads)
        owners = frozenset(self._model.get_submodule(parameter.rpartition(".")[0]) for parameter in loads)
        targets = copies.targets
        is_known = targets is not None and {block_target.module for block_target in targets} == owners
        self._routes[name] = _Route(frozenset(loads), owners, targets if is_known else None)

    @torch.no_grad()
    def end(self) -> None:
        """End the version.

        Raises:
            ValueError: a weight did not come, or not whole; the output layer has other values than came.
        """
        lacking = sorted({name for name, left in self._left.items() if left > 0} | (self._expected - self._loaded))
        if lacking:
            raise ValueError(f"{len(lacking)} weights of the model did not come, such as {lacking[0]}")
        for module in self._in_place_modules:
            method: Any = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)
        finalize_layerwise_reload(self._model, self._config)
        if self._head is not None:
            _check_head(self._model, self._head, self._columns)
        self._in_place = self._in_place or _in_place(self._routes)
        self._in_place_modules = {module for route in self._in_place.values() for module in route.modules}

    def _sample_head(self, shard: Shard) -> None:
        """Keep the columns of the output layer that are read back later."""
        rows, width = shard.global_shape
        if self._head is None:
            self._columns = sorted({0, width // 3, width - 1})
            self._head = shard.tensor.new_empty(rows, len(self._columns))
        (low, left), (height, size) = shard.offset, shard.tensor.shape
        for index, column in enumerate(self._columns):
            if left <= column < left + size:
                self._head[low : low + height, index] = shard.tensor[:, column - left]


class _Copies(TorchDispatchMode):
    """Inside, what a loader copies out of a weight is recorded.

    Args:
        owners: by their storage, the model's tensors, with their modules and names.
        filled: parts of them that were copied to; grows.

    Attributes:
        targets: of the blocks; None: something else than a block was copied.
    """

    def __init__(
        self, weight: Tensor, owners: Mapping[int, tuple[nn.Module, str, Tensor]], filled: set[tuple[Any, ...]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weight, self._owners, self._filled = weight, owners, filled
        self.targets: tuple[BlockTarget, ...] | None = () if weight.is_contiguous() else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, source = args[:2]
            owner = self._owners.get(to.untyped_storage()._cdata)
            if owner is not None and source.untyped_storage()._cdata not in self._owners:
                self._copied(*owner, to, source)
        return func(*args, **(kwargs or {}))

    def _copied(self, module: nn.Module, name: str, whole: Tensor, target: Tensor, source: Tensor) -> None:
        part = module, name, target.storage_offset(), tuple(target.shape)
        if part in self._filled:
            return
        self._filled.add(part)
        weight = self._weight
        is_of_it = source.untyped_storage()._cdata == weight.untyped_storage()._cdata
        if self.targets is None or not is_of_it or source.stride() != weight.stride() or source.shape != target.shape:
            self.targets = None
            return
        rest, offset = int(source.storage_offset() - weight.storage_offset()), []
        for stride in weight.stride():
            index, rest = divmod(rest, stride)
            offset.append(index)
        start = int(target.storage_offset() - whole.storage_offset())
        block = BlockTarget(tuple(offset), module, name, tuple(target.shape), target.stride(), start)
        self.targets = (*self.targets, block)


def _in_place(routes: Mapping[str, _Route]) -> dict[str, _Route]:
    """Those of layers that compute with the tensors that loaders fill, all of whose weights have known places."""
    others: set[nn.Module] = set()
    count = -1
    while count != len(others):
        count = len(others)
        for route in routes.values():
            is_plain = route.targets is not None and all(map(_is_plain, route.targets))
            if not is_plain or not others.isdisjoint(route.modules):
                others |= route.modules
    return {
        name: route for name, route in routes.items() if route.targets is not None and others.isdisjoint(route.modules)
    }


def _is_plain(block_target: BlockTarget) -> bool:
    """Whether a module computes with the tensor that a loader fills."""
    module, tensor = block_target.module, getattr(block_target.module, block_target.tensor)
    method = getattr(module, "quant_method", None)
    is_kept = method is None and not hasattr(module, "process_weights_after_loading")
    if not (is_kept or type(method).__name__ in _PLAIN) or any(True for _ in module.children()):
        return False
    parameters, buffers = get_layerwise_info(module).restore_metadata
    stored = {**parameters, **buffers}.get(block_target.tensor, tensor)
    return (stored.shape, stored.dtype, stored.stride()) == (tensor.shape, tensor.dtype, tensor.stride())


def _put_back(model: nn.Module, config: Any) -> None:
    """Give modules that await weights the tensors that they compute with, as they are."""
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = info.load_numel_total = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, config)


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
