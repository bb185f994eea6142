"""How a checkpoint is written: into a staging directory, by the process that saves and by writers beside it."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from verl._base.durable import (
    clear_staging,
    parse_json,
    publish,
    seal,
    seal_all,
    staging_of,
    sync_directory,
    try_remove,
)
from verl._base.schemas import CHECKPOINT
from verl.errors import CheckpointError
from verl.weights.shard import Shard, Stream
from verl.weights.tensor_files import write_shards

MANIFEST = "manifest.json"
#: Directory of the tokenizer.
TOKENIZER = "actor/tokenizer"
#: Names of contents, and of files.
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)


@dataclass(frozen=True)
class SaveResult:
    """How a save went: `error`, in plain words, when the disk did not take it."""

    error: str | None = None

    def __bool__(self) -> bool:
        return self.error is None


class Writer(Protocol):
    """Writes files of a checkpoint beside its saver: the ranks of a role, which have their shards of tensors."""

    def begin(self, folder: Path) -> None:
        """Begin to write into a staging directory.

        Raises:
            OSError: the disk does not take it.
        """

    def end(self, wait: bool) -> Mapping[str, Mapping[str, Any]] | None:
        """`sha256` and `size` of every file, by its path in the directory; None: not all are written, and it shall not
        wait.

        Raises:
            OSError: the disk did not take it.
            CheckpointError: a content that a checkpoint cannot hold.
        """


class TokenizerWriter:
    """Writes a tokenizer's own files, as the policy was trained with it: templates and tokens set in Python are in no
    other file."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._files: Mapping[str, Mapping[str, Any]] = {}

    def begin(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder / TOKENIZER)
        files = sorted(file for file in (folder / TOKENIZER).rglob("*") if file.is_file())
        self._files = seal_all(files, folder)

    def end(self, wait: bool) -> Mapping[str, Mapping[str, Any]]:
        return self._files


class Saving:
    """A save that has begun: its staging directory is there, its own files are in it, its writers are at work.

    Args:
        path: the place; what is there is replaced.
        on_end: called once with the result.

    Raises:
        CheckpointError: a name or a content that a checkpoint cannot hold; nothing has changed then.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        files: Mapping[str, Any],
        identity: Mapping[str, str],
        writers: Sequence[Writer] = (),
        on_end: Callable[[SaveResult], object] = lambda result: None,
    ) -> None:
        self.path, self.step, self._writers, self._on_end = path.absolute(), step, writers, on_end
        self._staging = staging_of(self.path)
        self._manifest = {CHECKPOINT.key: CHECKPOINT.current, "identity": dict(identity), "step": step}
        self._result: SaveResult | None = None
        with self._reported():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            clear_staging(self.path.parent)
            self._staging.mkdir()
            for writer in writers:
                writer.begin(self._staging)
            self._files = seal_all(_write_all(self._staging, files), self._staging)

    def wait(self) -> SaveResult:
        """Finish the save.

        Raises:
            CheckpointError: a writer has a content that a checkpoint cannot hold.
        """
        result = self.poll(wait=True)
        assert result is not None
        return result

    def poll(self, *, wait: bool = False) -> SaveResult | None:
        """Finish the save if its writers are done; None: they are not."""
        if self._result is None:
            with self._reported():
                reports = [writer.end(wait) for writer in self._writers]
                written = [files for files in reports if files is not None]
                if len(written) < len(reports):
                    return None
                for files in written:
                    self._files |= {name: dict(entry) for name, entry in files.items()}
                self._publish()
                self._end(SaveResult())
        return self._result

    def _publish(self) -> None:
        """Write the manifest, make everything durable and give the directory its name."""
        folders = {self._staging}
        for name, entry in self._files.items():
            file = self._staging / name
            if not file.is_file() or file.stat().st_size != entry["size"]:
                raise CheckpointError(
                    f"a rank has written '{name}', and it is not in {self.path.parent}: checkpoints lie on a file "
                    "system that all ranks share"
                )
            folders.update(folder for folder in file.parents if folder.is_relative_to(self._staging))
        manifest = {**self._manifest, "files": self._files}
        (self._staging / MANIFEST).write_bytes(dump_manifest({**manifest, "digest": manifest_digest(manifest)}))
        seal(self._staging / MANIFEST)
        for folder in sorted(folders, reverse=True):
            sync_directory(folder)
        publish(self._staging, self.path)

    def _end(self, result: SaveResult) -> None:
        try_remove(self._staging)
        self._result = result
        self._on_end(result)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Inside, a disk that refuses ends the save with a result, and any other error takes it back."""
        try:
            yield
        except OSError as error:
            self._end(SaveResult(f"checkpoint {self.path} was not saved: {reason(error)}"))
        except BaseException as error:
            try_remove(self._staging)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"checkpoint {self.path} was not saved: {error}") from None
            raise


def _write_all(staging: Path, files: Mapping[str, Any]) -> Iterator[Path]:
    """Write contents; yields each file."""
    for name, content in files.items():
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(f"'{name}' cannot be the name of a checkpoint's content")
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield from _write_content(target, content)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None


def _write_content(target: Path, content: Any) -> Iterable[Path]:
    if not target.suffix:
        if isinstance(content, Mapping):
            content = [Shard.whole(*item) for item in content.items()]
        return write_shards(target, Stream(content) if callable(content) else content)
    content = content() if callable(content) else content
    if target.suffix == ".json":
        try:
            raw = json.dumps(content).encode()
            parse_json(raw, Any)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"JSON cannot hold the content: {error}") from None
        target.write_bytes(raw)
    elif target.suffix == ".parquet":
        pq.write_table(content.table, target, compression="zstd")
    else:
        raise CheckpointError(f"'{target.name}': contents end in .json, .parquet or, for tensors, in nothing")
    return [target]


def reason(error: OSError) -> str:
    """Why a disk refused, in plain words."""
    plain = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would be larger than this process may write",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "no permission to write there",
    }
    text = plain.get(error.errno or 0) or error.strerror or str(error)
    return f"{text} ({error.filename})" if error.filename else text


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """What a manifest says of itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def dump_manifest(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written."""
    return json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
