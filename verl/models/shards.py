"""The weights of a live model as a stream of shards, and back in place.

Names are those of the model's state dictionary, which for dense architectures are the checkpoint's names;
tied weights occur once, under the first of their names (the embedding's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from verl.errors import CheckpointError, nearest
from verl.models.heads import ValueModel
from verl.shard import Shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers by name, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def model_shards(model: nn.Module) -> Iterator[Shard]:
    """Every weight and persistent buffer on the live tensors; of weights that are cut over ranks, the pieces here."""
    for name, tensor in named_weights(model):
        offset, local = local_block(tensor.detach())
        if local.numel() or not tensor.numel():
            yield Shard(name, tuple(tensor.shape), offset, local)


def local_block(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Where the part of a tensor that this rank holds begins, and that part, on the same memory. The tensor itself,
    where it is no DTensor."""
    if not hasattr(tensor, "placements"):
        return (0,) * tensor.dim(), tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    cut: Any = tensor
    _, offset = compute_local_shape_and_global_offset(cut.shape, cut.device_mesh, cut.placements)
    return tuple(offset), cut.to_local()


def cuts_of(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """How a tensor is cut over the ranks of a mesh, as `WeightSpec.cuts`."""
    cut: Any = tensor
    if not hasattr(tensor, "placements"):
        return ()
    named = zip(cut.device_mesh.mesh_dim_names, cut.placements, strict=True)
    return tuple((name, placement.dim) for name, placement in named if placement.is_shard())


@dataclass
class Block:
    """A part of a tensor, to be filled from shards that may be cut otherwise.

    Attributes:
        offset: where it begins, one index a dimension.
        missing: elements that have not come yet.
    """

    offset: tuple[int, ...]
    tensor: Tensor
    missing: int = -1

    def __post_init__(self) -> None:
        if self.missing < 0:
            self.missing = self.tensor.numel()

    def fill(self, shard: Shard, copy: bool = True) -> None:
        """Count, and copy, what a shard of the same tensor has of this part."""
        target, source = self.tensor, shard.tensor
        for dim, (here, there) in enumerate(zip(self.offset, shard.offset, strict=True)):
            low = max(here, there)
            size = max(0, min(here + target.shape[dim], there + source.shape[dim]) - low)
            target = target.narrow(dim, min(low - here, target.shape[dim]), size)
            source = source.narrow(dim, min(low - there, source.shape[dim]), size)
        if copy:
            target.copy_(source)
        self.missing -= source.numel()


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The name under which a tied weight is in the stream -> its other names, for a sink that keeps copies."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {first: others for first, *others in names.values() if others}


@torch.no_grad()
def load_model_shards(model: nn.Module, shards: Iterable[Shard]) -> None:
    """Copy shards, however they are cut, into the live tensors, in their dtype and on their device. Aliases of tied
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
    state = model.state_dict(keep_vars=True)
    blocks: dict[int, tuple[str, Block]] = {}
    for name, tensor in state.items():
        blocks.setdefault(id(tensor), (name, Block(*local_block(tensor.detach()))))
    for shard in shards:
        _check(shard, state, type(model).__name__)
        blocks[id(state[shard.name])][1].fill(shard, copy)
    lacking = [name for name, block in blocks.values() if block.missing > 0]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise CheckpointError(
            f"{len(lacking)} weights of this {type(model).__name__} did not come or came in part: "
            f"{', '.join(lacking[:3])}{more}. The checkpoint is of another model or is cut short"
        )


def _check(shard: Shard, state: Mapping[str, Tensor], model: str) -> None:
    """Raises CheckpointError: the model has no such weight, or it has another shape."""
    if shard.name not in state:
        raise CheckpointError(f"weight '{shard.name}' is not one of this {model}: {nearest(shard.name, state)}")
    shape = tuple(state[shard.name].shape)
    if shard.global_shape != shape:
        raise CheckpointError(
            f"weight '{shard.name}' has shape {list(shard.global_shape)}, the model's has {list(shape)}: "
            "the weights are of another model or size"
        )
    ends = (offset + size for offset, size in zip(shard.offset, shard.tensor.shape, strict=True))
    if min(shard.offset, default=0) < 0 or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise CheckpointError(f"a shard of '{shard.name}' at {list(shard.offset)} reaches outside the weight")


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


def _classifier_name(model: ValueModel) -> str:
    return type(model.backbone).__name__.removesuffix("Model") + "ForTokenClassification"
