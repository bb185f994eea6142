"""The weights of a live model as a stream of shards, and back in place; models without weights; and what a fork of this
process does without.

Names are those of the model's state dictionary, which for dense architectures are the checkpoint's names;
tied weights occur once, under the first of their names (the embedding's).

The parameters of a model without weights are on torch's meta device and take no memory until they are laid out over
ranks, so that a rank has memory for what it keeps alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import CheckpointError, ConfigError, ModelError, nearest
from verl.weights.shard import Blocks, Shape, Shard, Slice, blocks_of

#: Embeddings of a sample; more than the probes have tokens.
_VOCABULARY = 64
#: Bytes of a tensor above which a fork gives it back.
_LARGE = 1 << 20
#: The tensors of objects that forks of this process do without: training made them, none is the user's.
no_forks: weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[Any]]] = weakref.WeakKeyDictionary()


def tied(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each weight."""
    names: dict[int, list[str]] = {}
    for name, weight in weights.items():
        names.setdefault(id(weight), []).append(name)
    return [*names.values()]


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers by name, tied ones once."""
    state = model.state_dict(keep_vars=True)
    return ((first, state[first]) for first, *_ in tied(state))


def outline(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights by name, on the meta device: their shapes and dtypes, and which are trained."""
    weights = named_weights(model)
    return {name: torch.empty_like(w, device="meta", requires_grad=w.requires_grad) for name, w in weights}


def model_shards(model: nn.Module) -> Iterator[Shard]:
    """Every weight and persistent buffer on the live tensors; of sharded weights, this rank's shards."""
    for name, tensor in named_weights(model):
        for offset, block in blocks_of(tensor.detach()):
            yield Shard(name, tuple(tensor.shape), offset, block)


def whole_weights(shards: Iterable[Shard], parts: dict[str, tuple[Tensor, int]] | None = None) -> Iterator[Shard]:
    """Each weight whole, once all its elements have come; shards are put together until then.

    Args:
        parts: weights that are not whole, and how many of their elements are missing, of former calls and for later
            ones.
    """
    parts = {} if parts is None else parts
    for shard in shards:
        if shard.is_whole:
            yield shard
            continue
        if shard.name not in parts:
            parts[shard.name] = shard.tensor.new_empty(shard.global_shape), math.prod(shard.global_shape)
        whole, missing = parts[shard.name]
        shard.slice.of(whole).copy_(shard.tensor)
        parts[shard.name] = whole, missing - shard.tensor.numel()
        if missing == shard.tensor.numel():
            del parts[shard.name]
            yield Shard.whole(shard.name, whole)


def fill_blocks(blocks: Blocks, shard: Shard, copy: bool = True) -> int:
    """Copy what a shard has of blocks of its tensor, and return how many elements that are."""
    count = 0
    for offset, block in blocks:
        target, source = overlap(offset, block, shard)
        if copy:
            target.copy_(source)
        count += source.numel()
    return count


def overlap(offset: Shape, target: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """What the block `target` that begins at `offset` and a shard have in common, as parts of either."""
    common = Slice(offset, tuple(target.shape)) & shard.slice
    return common.of(target, offset), common.of(shard.tensor, shard.offset)


@dataclass
class HeldShards:
    """The shards of a rank. Its iterator is advanced only as far as it must be: some are made on the way."""

    _coming: Iterator[Shard]
    _by_name: dict[str, list[Shard]] = field(default_factory=dict)

    def find(self, name: str, wanted: Slice) -> Tensor:
        """A slice of a weight: a view of one shard, or a copy put together from several.

        Raises:
            ConfigError: this rank does not hold all of it.
        """
        while (block := self._look_up(name, wanted)) is None:
            shard = next(self._coming, None)
            if shard is None:
                raise ConfigError(
                    f"transition: this rank was expected to hold {list(wanted.shape)} of '{name}' from "
                    f"{list(wanted.offset)} on, and does not: its engine cuts weights otherwise than its specs say"
                )
            self._by_name.setdefault(shard.name, []).append(shard)
        return block

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._by_name.pop(name, None)

    def _look_up(self, name: str, wanted: Slice) -> Tensor | None:
        shards = self._by_name.get(name, [])
        for shard in shards:
            if wanted & shard.slice == wanted:
                return wanted.of(shard.tensor, shard.offset)
        if not shards or sum((wanted & shard.slice).numel for shard in shards) < wanted.numel:
            return None
        whole = shards[0].tensor.new_empty(wanted.shape)
        for shard in shards:
            fill_blocks([(wanted.offset, whole)], shard)
        return whole


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The name under which a tied weight is in the stream -> its other names, for a sink that keeps copies."""
    return {name: others for name, *others in tied(model.state_dict(keep_vars=True)) if others}


def load_model_shards(model: nn.Module, shards: Iterable[Shard], shapes: Mapping[str, Shape] | None = None) -> None:
    """Copy shards into the live tensors, in their dtype and on their device; see `fill_weights`.

    Args:
        shapes: of all weights by name, where `model` is a part of a model. None: they are those of `model`.
    """
    shapes = shapes or {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    blocks = {name: [*blocks_of(tensor.detach())] for name, tensor in named_weights(model)}
    fill_weights(blocks, shards, shapes, tied_names(model), type(model).__name__)


@torch.no_grad()
def fill_weights(
    weights: Mapping[str, Sequence[tuple[Shape, Tensor]]],
    shards: Iterable[Shard],
    shapes: Mapping[str, Shape],
    tied: Mapping[str, Sequence[str]],
    model: str,
) -> None:
    """Copy shards, however they are cut, into what is here of a model's weights.

    Args:
        weights: the blocks of each that are here: where it begins in the weight, and its tensor.
        shapes: of all weights of the model by name; shards of those that are not here are passed over.
        tied: see `tied_names`; shards may come under any of the names.
        model: its class, for messages.

    Raises:
        CheckpointError: a name or shape is not the model's, or a weight is missing or incomplete. Of a list nothing is
            copied then; a stream is consumed as it comes, so what was read before the fault has been copied.
    """
    first = {alias: name for name, aliases in tied.items() for alias in aliases}
    for copy in (False, True) if isinstance(shards, list) else (True,):
        missing = {name: sum(block.numel() for _, block in blocks) for name, blocks in weights.items()}
        for shard in shards:
            _check(shard, shapes, model)
            name = first.get(shard.name, shard.name)
            if name in weights:
                missing[name] -= fill_blocks(weights[name], shard, copy)
        if lacking := [name for name, count in missing.items() if count > 0]:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise CheckpointError(
                f"{len(lacking)} weights of this {model} did not come or came in part: {', '.join(lacking[:3])}{more}. "
                "The checkpoint is of another model or is cut short"
            )


def take_model_shards(model: nn.Module, shards: Iterable[Shard]) -> None:
    """`load_model_shards`, unless all of them are the model's own tensors already."""
    pointers = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    shards = list(shards)
    if not all(shard.tensor.data_ptr() in pointers for shard in shards):
        load_model_shards(model, shards)


def _check(shard: Shard, shapes: Mapping[str, Shape], model: str) -> None:
    """Raises CheckpointError: the model has no such weight, or it has another shape."""
    if shard.name not in shapes:
        raise CheckpointError(f"weight '{shard.name}' is not one of this {model}: {nearest(shard.name, shapes)}")
    shape = shapes[shard.name]
    if shard.global_shape != shape:
        raise CheckpointError(
            f"weight '{shard.name}' has shape {list(shard.global_shape)}, the model's has {list(shape)}: "
            "the weights are of another model or size"
        )
    if not shard.is_inside:
        raise CheckpointError(f"a shard of '{shard.name}' at {list(shard.offset)} reaches outside the weight")


def on_meta(make: Callable[[], Any], device: torch.device | str = "cpu") -> Any:
    """A transformers model without weights. Its buffers are on `device`, filled by the model's own code."""
    with torch.device("meta"):
        model = make()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for weight in model.parameters():  # what transformers leaves alone when it fills a model in
        weight._is_hf_initialized = True
    with torch.random.fork_rng(), torch.no_grad():
        model.initialize_weights()
    return model.eval()


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device | str) -> None:
    """Give parameters without memory some, not filled in: of cut ones, to this rank's parts. Tied ones stay tied."""
    tied = tied_names(model)
    model._apply(lambda tensor: _with_memory(tensor, device) if tensor.is_meta else tensor)
    _tie(model, tied)


@torch.no_grad()
def take_weights(model: nn.Module, shards: Iterable[Shard]) -> None:
    """Give a model, which may have none, the weights of a stream that has all of them: the very tensors, where they are
    whole and in the model's dtype (they may be mapped files); others are put together. Tied ones stay tied."""
    weights, tied = dict(named_weights(model)), tied_names(model)
    state = {shard.name: shard.tensor.to(weights[shard.name].dtype) for shard in whole_weights(shards)}
    state |= {other: state[first] for first, others in tied.items() for other in others}
    model.load_state_dict(state, assign=True)
    _tie(model, tied)


def _tie(model: nn.Module, tied: Mapping[str, Sequence[str]]) -> None:
    """Make the weights of these names (see `tied_names`) one again."""
    for first, others in tied.items():
        for owner, _, name in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(owner), name, attrgetter(first)(model))


def _with_memory(tensor: Tensor, device: torch.device | str) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return DTensor(torch.empty_like(tensor._local_tensor, device=device), tensor._spec, requires_grad=False)


def sample(model: Any, device: torch.device | str = "cpu", layers: int = 1) -> Any:
    """A small model that computes as `model` does, which may have no weights: of its class, with its first layers (as
    many as show every kind of layer that it has, and at least `layers`), few embeddings and random weights.

    Raises:
        ModelError: its layers differ too much, or it has none.
    """
    text = model.config.get_text_config()
    count = int(text.num_hidden_layers)
    stacks = stacks_of(model, count)
    kinds = [_kind(layer) for layer in stacks[0]] if stacks else []
    depth = max(layers, max((kinds.index(kind) for kind in kinds), default=count) + 1)
    if depth > min(8, count):  # more distinct layers than this are no sample
        raise ModelError(f"the layers of {type(model).__name__} are of too many kinds for a sample of them")
    config = deepcopy(model.config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    if text.vocab_size > _VOCABULARY:
        text.vocab_size, text.pad_token_id = _VOCABULARY, None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        small = type(model)._from_config(config, dtype=dtype)
        for weight in small.parameters():  # an error in what a layer adds must not drown in what it adds to
            scale = 1.5 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.1
            weight.add_(torch.randn_like(weight), alpha=scale)
    return small.to(device).eval()


def stacks_of(model: nn.Module, layers: int) -> list[nn.ModuleList]:
    """The lists of modules that may be the layers of a model: as long as it has layers."""
    return [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == layers]


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells a layer from others: its modules, their settings and the shapes of their weights."""
    kinds = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and key not in ("layer_idx", "training")
        }
        shapes = [(key, tuple(weight.shape)) for key, weight in module.named_parameters(recurse=False)]
        kinds.append((name, type(module), tuple(sorted(settings.items())), tuple(shapes)))
    return tuple(kinds)


def release_in_fork() -> None:
    """Give back the memory of the tensors in `no_forks`."""
    # A fork shares this process's memory until one of the two writes to it. Weights that are trained here would be
    # copied, page by page, for a process that never reads them.
    for owner, tensors in list(no_forks.items()):
        for weight in tensors(owner):
            for tensor in (weight, weight.grad):
                with suppress(Exception):  # what cannot be given back stays
                    storage: Any = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                    if storage.device.type == "cpu" and storage.nbytes() > _LARGE:
                        storage.resize_(0)
