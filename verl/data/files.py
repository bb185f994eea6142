"""Rows out of files: JSONL, JSON and Parquet, a directory of them, or an index that names them.

Nothing is unpickled, and no file that a data set names may lie outside the data set's directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.forms import table_rows, without_fills
from verl.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def is_files(source: Any) -> bool:
    """Whether this is a path, or a list of nothing but data files. A list of other texts is data itself."""
    if isinstance(source, list | tuple):
        return bool(source) and all(
            isinstance(item, Path) or (isinstance(item, str) and item.endswith(SUFFIXES)) for item in source
        )
    return isinstance(source, str | Path)


def named(source: Any) -> str:
    """What errors call a source."""
    if not is_files(source):
        return type(source).__name__
    return str(source) if isinstance(source, str | Path) else ", ".join(map(str, source))


def rows_by_file(source: Any) -> Iterator[tuple[Path | None, Any]]:
    """The rows of a data set in order, of files (mappings, or whatever a JSON line holds) or in memory (`table_rows`);
    each after the file that contains it (None: in memory).

    A directory means its data files in the order of their names; a JSON file holds a list of rows, or
    `{"files": [...]}`, an index of files next to it. The rows of several paths follow each other.

    Raises:
        DataError: a file is missing, of an unknown kind, damaged (with file and line), or reaching out of its
            directory; see `table_rows` for data in memory.
    """
    if not is_files(source):
        yield from zip(repeat(None), table_rows(source), strict=False)
        return
    if not isinstance(source, str | Path):
        for path in source:
            yield from rows_by_file(path)
        return
    try:
        for file in _files(Path(source)):
            yield from _read_file(file)
    except OSError as error:  # such as a directory that is named like a file, or one that is not ours to read
        raise DataError(f"{source} cannot be read: {error}. Mend or remove it") from error


def _files(path: Path) -> list[Path]:
    """The file, or the data files of a directory in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist: give a JSONL, JSON or Parquet file, or a directory of them")
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
    if not names:
        raise DataError(f"{path} holds no data files ({', '.join(SUFFIXES)})")
    return [inside(path, name) for name in names]


def inside(root: str | Path, name: str) -> Path:
    """The file `name`, given by a data set that lies in `root`.

    Raises:
        DataError: the name is absolute, climbs out with `..`, or follows a link out of `root`.
    """
    base = Path(root).resolve()
    target = (base / name).resolve()
    if Path(name).is_absolute() or not target.is_relative_to(base):
        raise DataError(f"'{name}' leaves the data set's directory {base}: only files inside it are read")
    return target


def recorded_files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """These files, if they hold experience: Parquet with `prompt_tokens` and `response_tokens`; else none."""
    if not isinstance(path, str | Path):
        lists = [recorded_files(one) for one in path]
        return [file for files in lists for file in files] if all(lists) else []
    files = _files(Path(path))
    if any(file.suffix != ".parquet" or not file.is_file() for file in files):
        return []
    try:
        columns = pq.read_schema(files[0]).names
    except (OSError, ValueError):
        return []  # the reader of rows says what is wrong
    return files if {"prompt_tokens", "response_tokens"} <= set(columns) else []


def digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """Sixteen hex digits over all values of the rows in order, whatever file or table holds them."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return sha.hexdigest()[:16]


def _read_file(path: Path) -> Iterator[tuple[Path, Any]]:
    if not path.is_file():  # opening a pipe or a device may never end
        raise OSError(f"{path} is not a regular file")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} is of an unknown kind: known are {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        rows: Iterable[Any] = _read_parquet(path)
    elif path.suffix == ".json" and not _is_lines(text := path.read_bytes()):
        rows = _decode(text, str(path))
        if isinstance(rows, dict) and isinstance(rows.get("files"), list):
            for name in rows["files"]:
                file = inside(path.parent, str(name))
                if not file.is_file() or file == path.resolve():
                    raise DataError(f"{path} names '{name}', which is no data file beside it")
                yield from _read_file(file)
            return
        if not isinstance(rows, list):
            raise DataError(f'{path} holds neither a list of rows, nor JSON Lines, nor {{"files": [...]}}')
    else:
        rows = _read_lines(path)
    yield from zip(repeat(path), rows, strict=False)


def _read_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _decode(line, f"{path}, line {number}")


def _is_lines(text: bytes) -> bool:
    """Whether the first line is a whole object and not the last: JSON Lines, as hubs name them `.json`, too."""
    first, _, rest = text.lstrip().partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            if len({*file.schema_arrow.names}) < len(file.schema_arrow.names):
                raise ValueError(f"columns of one name: {file.schema_arrow.names}")
            for chunk in file.iter_batches(batch_size=1024):
                yield from map(without_fills, chunk.to_pylist())
    except (pa.ArrowException, ValueError, OverflowError, OSError) as error:  # damage, or values Python has no type for
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _decode(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise DataError(f"{where} is not valid JSON: {error}. Mend or remove it") from error
