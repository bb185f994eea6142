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

from verl.errors import CheckpointError
from verl.shard import Shard

MAX_FILE_BYTES = 1 << 28
SUFFIX = ".safetensors"
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
        CheckpointError: two tensors have one name, or a dtype that the format lacks.
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
        CheckpointError: a file is no safetensors file.
    """
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {}).get("shards", "{}"))
                for key in file.keys():  # noqa: SIM118 - not a dictionary
                    tensor = file.get_tensor(key)
                    name, shape, offset = places.get(key, (key, tensor.shape, [0] * tensor.dim()))
                    yield Shard(name, tuple(shape), tuple(offset), tensor)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as tensors: {error}") from error


def _write(stem: Path, number: int, part: Mapping[str, Shard]) -> Path:
    # Widest types first keep every tensor aligned, as readers that map the file demand.
    order = sorted(part, key=lambda key: (-part[key].tensor.element_size(), key))
    header: dict[str, Any] = {}
    places = {key: [s.name, s.global_shape, s.offset] for key, s in part.items() if not s.is_whole}
    if places:
        header["__metadata__"] = {"shards": json.dumps(places)}
    at = 0
    for key in order:
        tensor = part[key].tensor
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"tensor '{key}' has dtype {tensor.dtype}, which checkpoints cannot hold")
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
