"""The weights of a live model as a stream of shards, and back in place.

Names are those of the model's state dictionary, which for dense architectures are the checkpoint's names;
tied weights occur once, under the first of their names (the embedding's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from verl.errors import CheckpointError, nearest
from verl.models.heads import ValueModel
from verl.shard import Shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def model_shards(model: nn.Module) -> Iterator[Shard]:
    """Every weight and persistent buffer, whole, on the live tensors (nothing is copied, unless they are cut over
    ranks, which then draw together)."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield Shard.whole(name, whole(tensor.detach()))


def is_cut(tensor: Tensor) -> bool:
    """Whether it is a DTensor: cut by rows over the ranks of a mesh, as `torch.chunk` cuts."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor; one that is cut is put together from all ranks, by all of them."""
    return cast(Any, tensor).full_tensor() if is_cut(tensor) else tensor


def first_row(cut: Tensor) -> int:
    """The first row of a cut tensor that this rank holds."""
    mesh = cast(Any, cut).device_mesh
    return int(-(-cut.shape[0] // mesh.size()) * mesh.get_local_rank())


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The name under which a tied weight is in the stream -> its other names, for a sink that keeps copies."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {first: others for first, *others in names.values() if others}


@torch.no_grad()
def load_model_shards(model: nn.Module, shards: Iterable[Shard]) -> None:
    """Copy a stream of shards into the live tensors, in their dtype and on their device. Aliases of tied
    weights may come along.

    Raises:
        CheckpointError: a name or shape is not the model's, or a weight is missing or incomplete. Of a list nothing is
            copied then; a stream is consumed as it comes, so what was read before the fault has been copied.
    """
    for copy in (False, True) if isinstance(shards, list) else (True,):
        _load(model, shards, copy)


def take_model_shards(model: nn.Module, shards: Iterable[Shard]) -> None:
    """`load_model_shards`, unless all of them are the model's own tensors already."""
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    shards = list(shards)
    if not all(shard.tensor.data_ptr() in own for shard in shards):
        load_model_shards(model, shards)


def _load(model: nn.Module, shards: Iterable[Shard], copy: bool) -> None:
    """Check a stream of shards and, if so, copy it."""
    state = model.state_dict(keep_vars=True)
    missing: dict[int, tuple[str, int]] = {}
    for name, tensor in state.items():
        missing.setdefault(id(tensor), (name, tensor.numel()))
    for shard in shards:
        if shard.name not in state:
            raise CheckpointError(
                f"weight '{shard.name}' is not one of this {type(model).__name__}: {nearest(shard.name, state)}"
            )
        tensor = state[shard.name]
        target, source = _place(shard, tensor)
        if copy:
            target.copy_(source)
        name, count = missing[id(tensor)]
        missing[id(tensor)] = (name, count - shard.tensor.numel())
    lacking = [name for name, count in missing.values() if count > 0]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise CheckpointError(
            f"{len(lacking)} weights of this {type(model).__name__} did not come or came in part: "
            f"{', '.join(lacking[:3])}{more}. The checkpoint is of another model or is cut short"
        )


def save_pretrained_dir(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, path: str | Path) -> None:
    """Write a plain Hugging Face directory: `config.json`, safetensors weights, and the tokenizer's files.

    A `ValueModel` is written as a token classifier with one label.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        config = type(model.config).from_dict(model.config.to_dict())
        config.num_labels = 1
        config.architectures = [_classifier_name(model)]
        config.save_pretrained(path)
        weights = {shard.name: shard.tensor.contiguous() for shard in model_shards(model)}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    else:
        model.save_pretrained(path)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def _place(shard: Shard, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a weight that a shard is of, and what of the shard belongs there."""
    if shard.global_shape != tuple(tensor.shape):
        raise CheckpointError(
            f"weight '{shard.name}' has shape {list(shard.global_shape)}, the model's has {list(tensor.shape)}: "
            "the weights are of another model or size"
        )
    for dim, (offset, size) in enumerate(zip(shard.offset, shard.tensor.shape, strict=True)):
        if offset < 0 or offset + size > tensor.shape[dim]:
            raise CheckpointError(f"a shard of '{shard.name}' at {list(shard.offset)} reaches outside the weight")
    source, target, places = shard.tensor, tensor.detach(), shard.offset
    if is_cut(tensor):  # of the rows that came, those that are held here
        target = cast(Any, target).to_local()
        first, begin = first_row(tensor), places[0]
        low, high = max(begin, first), min(begin + len(source), first + len(target))
        if low >= high:
            return target[:0], source[:0]
        source, places = source[low - begin : high - begin], (low - first, *places[1:])
    for dim, (offset, size) in enumerate(zip(places, source.shape, strict=True)):
        target = target.narrow(dim, offset, size)
    return target, source


def _classifier_name(model: ValueModel) -> str:
    return type(model.backbone).__name__.removesuffix("Model") + "ForTokenClassification"
