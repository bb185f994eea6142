"""Streams of shards as safetensors files of bounded size, written tensor by tensor.

The library's own writer holds a copy of a whole file's tensors in memory and refuses views of one storage; the
format is a length, a JSON header and the bytes, so it is written here and read by the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl.durable import parse_json
from verl.errors import CheckpointError, DamagedCheckpointError
from verl.shard import Shard

MAX_FILE_BYTES = 1 << 28
SUFFIX = ".safetensors"
# Of a part of a weight, in the file's metadata: name, global shape, offset.
_PIECES = dict[str, tuple[str, list[int], list[int]]]
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


def write_shards(
    stem: Path, content: Mapping[str, torch.Tensor] | Iterable[Shard], max_bytes: int = MAX_FILE_BYTES
) -> Iterator[Path]:
    """Write tensors to `<stem>-00001.safetensors` and so on, and yield each file when it is written; an empty stream
    makes one empty file.

    Raises:
        CheckpointError: two tensors have one name; one has a dtype that the format lacks, or values that are not
            finite.
    """
    stream = (Shard.whole(*item) for item in content.items()) if isinstance(content, Mapping) else content
    names: set[str] = set()
    part: dict[str, Shard] = {}
    number, size = 1, 0
    for shard in stream:
        key = shard.name if shard.is_whole else f"{shard.name}@{','.join(map(str, shard.offset))}"
        if key in names:
            raise CheckpointError(f"two tensors of '{stem.name}' are called '{key}'")
        if part and size + shard.nbytes > max_bytes:
            yield _write(stem, number, part)
            part, number, size = {}, number + 1, 0
        names.add(key)
        part[key] = shard
        size += shard.nbytes
    if part or number == 1:
        yield _write(stem, number, part)


def read_shards(paths: Iterable[Path]) -> Iterator[Shard]:
    """The shards in files; the tensors are views of the mapped files.

    Raises:
        DamagedCheckpointError: a file is no safetensors file, or names a piece that does not lie in its weight.
    """
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                pieces = parse_json((file.metadata() or {}).get("shards", "{}").encode(), _PIECES)
                for key in file.keys():  # noqa: SIM118 - not a dictionary
                    yield _shard(key, file.get_tensor(key), pieces.get(key))
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{path} cannot be read as tensors: {error}") from None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; integers are."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    tensor = tensor.float() if tensor.element_size() == 1 else tensor
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))  # NaN is passed on by both


def _shard(key: str, tensor: torch.Tensor, piece: tuple[str, list[int], list[int]] | None) -> Shard:
    if piece is None:
        return Shard.whole(key, tensor)
    name, shape, offset = piece
    ends = [begin + size for begin, size in zip(offset, tensor.shape, strict=False)]
    fits = len(shape) == len(offset) == tensor.dim() and min(offset, default=0) >= 0
    if not fits or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise ValueError(f"'{key}' of shape {list(tensor.shape)} at {offset} does not lie in {shape}")
    return Shard(name, tuple(shape), tuple(offset), tensor)


def _write(stem: Path, number: int, part: Mapping[str, Shard]) -> Path:
    # Widest types first keep every tensor aligned, as readers that map the file demand.
    order = sorted(part, key=lambda key: (-part[key].tensor.element_size(), key))
    header: dict[str, Any] = {}
    pieces = {key: [s.name, s.global_shape, s.offset] for key, s in part.items() if not s.is_whole}
    if pieces:
        header["__metadata__"] = {"shards": json.dumps(pieces)}
    at = 0
    for key in order:
        tensor = part[key].tensor
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"tensor '{key}' has dtype {tensor.dtype}, which checkpoints cannot hold")
        if not is_finite(tensor):
            raise CheckpointError(
                f"'{key}' has values that are not finite, so training has diverged: lower the learning rate and go on "
                "from the checkpoint before"
            )
        span = [at, at := at + part[key].nbytes]
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path = stem.with_name(f"{stem.name}-{number:05d}{SUFFIX}")
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for key in order:
            flat = part[key].tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
    return path
