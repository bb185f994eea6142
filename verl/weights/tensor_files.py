"""Streams of shards as safetensors files of bounded size, written tensor by tensor.

The library's own writer holds a copy of a whole file's tensors in memory and refuses views of one storage; the
format is a length, a JSON header and the bytes, so it is written here and read by the library. The ranks of a job
write files of their own, `<stem>-<rank>-00001.safetensors` and so on; each tensor in them may be a shard of a weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl._base.durable import parse_json
from verl.errors import CheckpointError, DamagedCheckpointError
from verl.weights.shard import Shard, buckets

MAX_FILE_BYTES = 1 << 28
SUFFIX = ".safetensors"
# Of each shard that is not a whole weight, in the file's metadata: name, global shape, offset.
_SHARDS = dict[str, tuple[str, list[int], list[int]]]
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_shards(stem: Path, shards: Iterable[Shard], max_bytes: int = MAX_FILE_BYTES) -> Iterator[Path]:
    """Write tensors to `<stem>-00001.safetensors` and so on, and yield each file when it is written; an empty stream
    makes one empty file.

    Args:
        shards: the same each time they are drawn: first to see what there is, then for the values, of which one tensor
            is held at a time.

    Raises:
        CheckpointError: two tensors have one name; one has a dtype that the format lacks, or values that are not
            finite.
    """
    outlines: dict[str, Shard] = {}
    for shard in shards:
        key = shard.name if shard.is_whole else f"{shard.name}@{','.join(map(str, shard.offset))}"
        if key in outlines:
            raise CheckpointError(f"two tensors of '{stem.name}' are called '{key}'")
        if shard.tensor.dtype not in _DTYPES:
            raise CheckpointError(f"tensor '{key}' has dtype {shard.tensor.dtype}, which checkpoints cannot hold")
        outlines[key] = replace(shard, tensor=torch.empty_like(shard.tensor, device="meta"))
        del shard  # before the next one is made
    # Widest types first keep every tensor aligned, as readers that map the file demand.
    ordered = sorted(outlines.items(), key=lambda item: -item[1].tensor.itemsize)
    widths = dict.fromkeys(outline.tensor.itemsize for _, outline in ordered)
    # Unlike a generator expression, a filter lets go of a shard before the next one is made.
    values = chain.from_iterable(filter(lambda shard: shard.tensor.itemsize == width, shards) for width in widths)
    parts = [*buckets(ordered, lambda item: item[1].nbytes, max_bytes)] or [[]]
    for number, part in enumerate(parts, 1):
        yield _write(stem.with_name(f"{stem.name}-{number:05d}{SUFFIX}"), part, values)


def read_shards(paths: Iterable[Path]) -> Iterator[Shard]:
    """The shards in files; the tensors are views of the mapped files.

    Raises:
        DamagedCheckpointError: a file is no safetensors file, or names a shard that does not lie in its weight.
    """
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                partial_shards = parse_json((file.metadata() or {}).get("shards", "{}").encode(), _SHARDS)
                for key in file.keys():  # noqa: SIM118 - not a dictionary
                    tensor = file.get_tensor(key)
                    name, shape, offset = partial_shards.get(key) or (key, tensor.shape, [0] * tensor.dim())
                    shard = Shard(name, tuple(shape), tuple(offset), tensor)
                    if not (len(shape) == len(offset) == tensor.dim() and shard.is_inside):
                        raise ValueError(f"'{key}' of shape {list(tensor.shape)} at {offset} does not lie in {shape}")
                    yield shard
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{path} cannot be read as tensors: {error}") from None


def files_of(stem: str, names: Iterable[str]) -> list[str]:
    """The file names that hold tensors of a stem, of all ranks that wrote some."""
    pattern = re.compile(re.escape(stem) + r"(-\d+)?-\d{5}" + re.escape(SUFFIX))
    return sorted(name for name in names if pattern.fullmatch(name))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; integers are."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    tensor = tensor.float() if tensor.element_size() == 1 else tensor
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))  # NaN is passed on by both


def _write(path: Path, part: list[tuple[str, Shard]], values: Iterator[Shard]) -> Path:
    """Write a file of the tensors that `part` outlines by their names there; their values come in the same order."""
    header: dict[str, Any] = {}
    if partial_shards := {key: (s.name, s.global_shape, s.offset) for key, s in part if not s.is_whole}:
        header["__metadata__"] = {"shards": json.dumps(partial_shards)}
    end = 0
    for key, shard in part:
        span = [end, end := end + shard.nbytes]
        header[key] = {"dtype": _DTYPES[shard.tensor.dtype], "shape": [*shard.tensor.shape], "data_offsets": span}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for key, _ in part:
            tensor = next(values).tensor
            if not is_finite(tensor):
                raise CheckpointError(
                    f"'{key}' has values that are not finite, so training has diverged: lower the learning rate and go "
                    "on from the checkpoint before"
                )
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
    return path
