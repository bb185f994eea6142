"""The weights of a live model as a stream of shards, and back in place.

Names are those of the model's state dictionary, which for dense architectures are the checkpoint's names;
tied weights occur once, under the first of their names (the embedding's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby

import torch
from torch import Tensor, nn

from verl.errors import CheckpointError, nearest
from verl.weights.shard import Shard, Slice, blocks_of


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


def whole_weights(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Each weight whole, of shards of which those of one weight follow each other."""
    for name, parts in groupby(shards, lambda part: part.name):
        first = next(parts)
        if first.is_whole:
            yield first
            continue
        whole = first.tensor.new_empty(first.global_shape)
        for part in chain([first], parts):
            part.slice.of(whole).copy_(part.tensor)
        yield Shard.whole(name, whole)


def fill_blocks(blocks: Iterable[tuple[tuple[int, ...], Tensor]], shard: Shard) -> int:
    """Copy what a shard has of blocks of its tensor (where each begins, and its elements), and return how many elements
    that are."""
    return sum(fill_block(offset, block, shard) for offset, block in blocks)


def fill_block(offset: tuple[int, ...], target: Tensor, shard: Shard, copy: bool = True) -> int:
    """Copy what a shard has of the block `target` that begins at `offset`, and return how many elements that are."""
    target, source = overlap(offset, target, shard)
    if copy:
        target.copy_(source)
    return source.numel()


def overlap(offset: tuple[int, ...], target: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """What the block `target` that begins at `offset` and a shard have in common, as parts of either."""
    common = Slice(offset, tuple(target.shape)) & shard.slice
    return common.of(target, offset), common.of(shard.tensor, shard.offset)


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The name under which a tied weight is in the stream -> its other names, for a sink that keeps copies."""
    return {name: others for name, *others in tied(model.state_dict(keep_vars=True)) if others}


def load_model_shards(
    model: nn.Module, shards: Iterable[Shard], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Copy shards into the live tensors, in their dtype and on their device; see `fill_weights`.

    Args:
        shapes: of all weights by name, where `model` is a part of a model. None: they are those of `model`.
    """
    shapes = shapes or {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    blocks = {name: [*blocks_of(tensor.detach())] for name, tensor in named_weights(model)}
    fill_weights(blocks, shards, shapes, tied_names(model), type(model).__name__)


@torch.no_grad()
def fill_weights(
    weights: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]],
    shards: Iterable[Shard],
    shapes: Mapping[str, tuple[int, ...]],
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
            for offset, block in weights.get(name, ()):
                missing[name] -= fill_block(offset, block, shard, copy)
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


def _check(shard: Shard, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
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
