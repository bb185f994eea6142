"""Checkpoints: a directory that is whole or invisible.

    step-000010/
        manifest.json                        format, step, identity, SHA-256 and size of every other file, own digest
        actor/weights-0-00001.safetensors    tensors, in files of bounded size, of rank 0
        trainer.json                         JSON state
        buffer.parquet                       a table of samples

A save writes into a staging directory next to its target, makes every file and directory durable, and then renames.
The ranks of a job write their own files into the staging directory, so it lies on a file system that all of them share.
Loading compares digests first, refuses paths that leave the directory, and unpickles nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from verl._base import durable
from verl._base.checked import checked
from verl._base.record import Natural
from verl._base.schemas import CHECKPOINT
from verl.batch import Batch
from verl.errors import CheckpointError, DamagedCheckpointError, DataError
from verl.weights.shard import Shard
from verl.weights.tensor_files import files_of, read_shards, write_shards

if TYPE_CHECKING:
    from verl.checkpoint.state import RoleWriter

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
        writers: Sequence[RoleWriter] = (),
        on_end: Callable[[SaveResult], object] = lambda result: None,
    ) -> None:
        self.path, self.step, self._writers, self._on_end = path.absolute(), step, [*writers], on_end
        self._staging = durable.staging_of(self.path)
        self._manifest = {CHECKPOINT.key: CHECKPOINT.current, "identity": dict(identity), "step": step}
        self._result: SaveResult | None = None
        with self._reported():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            durable.clear_staging(self.path.parent)
            self._staging.mkdir()
            for writer in writers:
                writer.begin(self._staging)
            self._files = durable.seal_all(_write_all(self._staging, files), self._staging)

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
                while self._writers:
                    if (files := self._writers[0].end(wait)) is None:
                        return None
                    self._files |= files
                    self._writers.pop(0)
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
        (self._staging / MANIFEST).write_bytes(dump_manifest({**self._manifest, "files": self._files}))
        durable.digest(self._staging / MANIFEST, seal=True)
        # The rename comes last, after all that it names is durable: a crash before it leaves a staging directory, which
        # the next save clears, and never half a checkpoint.
        for folder in sorted(folders, reverse=True):
            durable.sync_directory(folder)
        durable.publish(self._staging, self.path)

    def _end(self, result: SaveResult) -> None:
        durable.try_remove(self._staging)
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
            durable.try_remove(self._staging)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"checkpoint {self.path} was not saved: {error}") from None
            raise


def _write_all(staging: Path, files: Mapping[str, Any]) -> Iterator[Path]:
    """Write contents; yields each file."""
    for name, content in files.items():
        if not NAME.fullmatch(name.removesuffix("/")) or name == MANIFEST:
            raise CheckpointError(f"'{name}' cannot be the name of a checkpoint's content")
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if name.endswith("/"):
                content(target)
                yield from sorted(file for file in target.rglob("*") if file.is_file())
            else:
                yield from _write_content(target, content)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None


def _write_content(target: Path, content: Any) -> Iterable[Path]:
    content = content() if callable(content) else content
    if not target.suffix:
        is_named = isinstance(content, Mapping)
        return write_shards(target, [Shard.whole(*item) for item in content.items()] if is_named else content)
    if target.suffix == ".json":
        try:
            raw = json.dumps(content).encode()
            durable.parse_json(raw, Any)
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


def dump_manifest(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written: with the digest of its entries, which are `manifest`."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "digest": digest}, indent=1, sort_keys=True).encode() + b"\n"


class _File(BaseModel):
    sha256: str
    size: NonNegativeInt


class _Manifest(BaseModel):
    digest: str
    format: int
    files: dict[str, _File]
    identity: dict[str, str]
    step: NonNegativeInt


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose digests were right when it was loaded."""

    path: Path
    step: int
    files: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return name in self.files or bool(files_of(str(name), self.files))

    def json(self, name: str, schema: Any = Any) -> Any:
        """The value stored under `name` (which ends in ".json"), checked by a pydantic schema in strict mode."""
        try:
            return durable.read_json(self.paths(name)[0], schema)
        except (OSError, ValueError) as error:
            raise self.damaged(f"{name}: {error}") from None

    def batch(self, name: str) -> Batch:
        """The table stored under `name` (which ends in ".parquet")."""
        try:
            return Batch.from_parquet(self.paths(name)[0])
        except (DataError, pa.ArrowException) as error:
            raise self.damaged(f"{name}: {error}") from None

    def shards(self, name: str) -> Iterator[Shard]:
        """The tensors stored under `name` as a stream, cut as the ranks had them; views of the files, to be copied
        from."""
        return read_shards(self.paths(name))

    def paths(self, name: str) -> list[Path]:
        """The file stored under `name`, or the files of the tensors."""
        if not (files := [name] if name in self.files else files_of(name, self.files)):
            raise CheckpointError(f"checkpoint {self.path} holds no '{name}'; it holds {', '.join(self.files)}")
        return [self.path / file for file in files]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors stored under `name`, all at once; copies."""
        return {shard.name: shard.tensor.clone() for shard in self.shards(name)}

    def damaged(self, fault: str) -> DamagedCheckpointError:
        """The error that says what is wrong with the content."""
        return DamagedCheckpointError(f"checkpoint {self.path} is damaged: {fault}")


@checked
def save_checkpoint(
    path: str | Path,
    step: Natural,
    files: Mapping[str, Any],
    identity: Mapping[str, str] | None = None,
    writers: Sequence[RoleWriter] = (),
) -> SaveResult:
    """Write a checkpoint directory, replacing a checkpoint that is there and nothing else. A full or read-only disk
    raises nothing: the result says what happened, and the old checkpoint is untouched.

    Args:
        files: content by name. "x.json": a JSON value; "x.parquet": a `Batch`; a name without an ending: tensors by
            name, or a list of shards. A function is called for its content when its turn comes, after all writers have
            begun. "x/": a function that writes the directory whose path it is given.
        identity: what a reader must have in common with this run; see `model_identity`.
        writers: what else writes files: the ranks of each role.

    Raises:
        CheckpointError: a name or a content that a checkpoint cannot hold, such as a tensor that is not finite; or what
            is at `path` is no checkpoint.
    """
    path = Path(path).absolute()
    try:
        if os.path.lexists(path) and any(path.iterdir()):
            durable.read_json(path / MANIFEST, _Manifest)  # others have a file of that name, too
    except (OSError, ValueError):
        raise CheckpointError(
            f"{path} is there already and is no checkpoint (it has no {MANIFEST} of one): nothing was saved, and it is "
            "as it was; name a directory that is not there yet, or an empty one"
        ) from None
    return Saving(path, step, files, identity or {}, writers).wait()


def load_checkpoint(
    path: str | Path, identity: Mapping[str, str] | None = None, unknown: Iterable[str] = ()
) -> Checkpoint:
    """Check a checkpoint and open it.

    Args:
        identity: what the checkpoint must have been saved with; None: not compared.
        unknown: parts of an identity that the caller cannot know, and that are not compared.

    Raises:
        DamagedCheckpointError: it is missing, incomplete or changed; says which file and how.
        CheckpointError: it has another format, or belongs to another model or configuration; names the differences.
    """
    root = Path(path).absolute()
    durable.recover(root)
    manifest = _read_manifest(root)
    for name, entry in manifest.files.items():
        if fault := _file_fault(root, name, entry.size, entry.sha256):
            raise DamagedCheckpointError(f"checkpoint {root} is damaged: {fault}")
    if identity is not None:
        saved = {key: f"'{value}'" for key, value in manifest.identity.items() if key not in unknown}
        wanted = {key: f"'{value}'" for key, value in identity.items()}
        if differences := [
            f"{key} is {saved.get(key, 'not given')} there and {wanted.get(key, 'not given')} here"
            for key in sorted({*saved, *wanted})
            if saved.get(key) != wanted.get(key)
        ]:
            raise CheckpointError(
                f"checkpoint {root} belongs to another model or configuration: {'; '.join(differences)}. Use the model "
                "and configuration it was made with, or start anew"
            )
    return Checkpoint(root, manifest.step, tuple(manifest.files))


def model_identity(role: str, architecture: str, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What tells a role's model from another: its architecture, the names and shapes of its weights, their number."""
    shapes = sorted((name, tuple(weight.shape)) for name, weight in weights.items())
    total = sum(math.prod(shape) for _, shape in shapes)
    sha = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return {f"{role}.architecture": architecture, f"{role}.parameters": str(total), f"{role}.shapes": sha[:16]}


def _read_manifest(root: Path) -> _Manifest:
    file = root / MANIFEST
    if not root.is_dir():
        raise DamagedCheckpointError(f"there is no checkpoint at {root}")
    if file.is_symlink() or not file.is_file():
        raise DamagedCheckpointError(f"{root} is no checkpoint, or a damaged one: it has no {MANIFEST}")
    try:
        content = durable.read_json(file, dict[str, Any])
        # Byte for byte as a save writes it: parsing alone would pass repeated keys and changed white space.
        if file.read_bytes() == dump_manifest({key: value for key, value in content.items() if key != "digest"}):
            if type(content.get("format")) is int:  # a later format may have other keys, and is not damaged
                CHECKPOINT.check(content["format"], f"checkpoint {root}")
            manifest: _Manifest = durable.read_json(file, _Manifest)
            if manifest.model_dump() == content:
                return manifest
    except (OSError, ValueError):
        pass
    raise DamagedCheckpointError(f"checkpoint {root} is damaged: {MANIFEST} has been cut or changed")


def _file_fault(root: Path, name: str, size: int, sha256: str) -> str | None:
    """The fault of a file in the manifest, if any."""
    if not NAME.fullmatch(name):
        return f"its manifest names '{name}', which is outside of the checkpoint"
    path = root
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            return f"'{name}' is or passes through a symbolic link"
    try:
        # Neither a link put there meanwhile nor a pipe without a writer may hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return f"'{name}' cannot be opened: {error.strerror}"
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return f"'{name}' is no regular file"
        if status.st_size != size:
            return f"'{name}' has {status.st_size} bytes instead of {size}"
        if durable.digest(descriptor) != sha256:
            return f"the content of '{name}' has changed (its SHA-256 differs)"
    finally:
        os.close(descriptor)
    return None
