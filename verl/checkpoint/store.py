"""Checkpoints: a directory that is whole or invisible.

    step-000010/
        manifest.json                        format, step, identity, SHA-256 and size of every other file, own digest
        actor/weights-0-00001.safetensors    tensors, in files of bounded size, of rank 0
        trainer.json                         JSON state
        buffer.parquet                       a table of samples

A save writes into a staging directory beside its place, makes every file and directory durable, and then renames.
The ranks of a job write their own files into the staging directory, so it lies on a file system that all of them share.
Loading compares digests first, refuses paths that leave the directory, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from verl._base.checked import checked
from verl._base.durable import digest, read_json, recover
from verl._base.record import Natural
from verl._base.schemas import CHECKPOINT
from verl.batch import Batch
from verl.checkpoint.saving import MANIFEST, NAME, SaveResult, Saving, Writer, dump_manifest, manifest_digest
from verl.errors import CheckpointError, DamagedCheckpointError, DataError
from verl.weights.shard import Shard
from verl.weights.tensor_files import files_of, is_finite, read_shards


class _File(BaseModel):
    sha256: str
    size: NonNegativeInt


class _AnyManifest(BaseModel):
    """What a manifest has in every format, as sorted JSON: so one of a later format does not pass for a damaged one."""

    digest: str
    format: int


class _Manifest(_AnyManifest):
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
            return read_json(self._file(name), schema)
        except (OSError, ValueError) as error:
            raise self.damaged(f"{name}: {error}") from None

    def batch(self, name: str) -> Batch:
        """The table stored under `name` (which ends in ".parquet")."""
        try:
            return Batch.from_parquet(self._file(name))
        except (DataError, pa.ArrowException) as error:
            raise self.damaged(f"{name}: {error}") from None

    def shards(self, name: str) -> Iterator[Shard]:
        """The tensors stored under `name` as a stream, cut as the ranks had them; views of the files, to be copied
        from."""
        return read_shards(self.paths(name))

    def paths(self, name: str) -> list[Path]:
        """The files of the tensors stored under `name`."""
        if not (files := files_of(name, self.files)):
            raise self._absent(name)
        return [self.path / file for file in files]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors stored under `name`, all at once; copies."""
        return {shard.name: shard.tensor.clone() for shard in self.shards(name)}

    def damaged(self, fault: str) -> DamagedCheckpointError:
        """The error that says what is wrong with the content."""
        return DamagedCheckpointError(f"checkpoint {self.path} is damaged: {fault}")

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise self._absent(name)
        return self.path / name

    def _absent(self, name: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path} holds no '{name}'; it holds {', '.join(self.files)}")


@checked
def save_checkpoint(
    path: str | Path,
    step: Natural,
    files: Mapping[str, Any],
    identity: Mapping[str, str] | None = None,
    writers: Sequence[Writer] = (),
) -> SaveResult:
    """Write a checkpoint directory, replacing a checkpoint that is there and nothing else. A disk that is full or
    read-only is no exception: the result says what happened, and what was there before is untouched.

    Args:
        files: content by name. "x.json": a JSON value; "x.parquet": a `Batch`; a name without an ending: tensors by
            name, a list of shards, or a function that begins a stream of them. For another name, a function is called
            for its content when its turn comes, after all writers have begun.
        identity: what a reader must have in common with this run; see `model_identity`.
        writers: what else writes files.

    Raises:
        CheckpointError: a name or a content that a checkpoint cannot hold, such as a tensor that is not finite; or what
            is at `path` is no checkpoint.
    """
    path = Path(path).absolute()
    if not _may_replace(path):
        raise CheckpointError(
            f"{path} is there already and is no checkpoint (it has no {MANIFEST} of one): nothing was saved, and it is "
            "as it was; name a directory that is not there yet, or an empty one"
        )
    return Saving(path, step, files, identity or {}, writers).wait()


def load_checkpoint(
    path: str | Path, identity: Mapping[str, str] | None = None, unknown: Iterable[str] = ()
) -> Checkpoint:
    """Check a checkpoint and open it.

    Args:
        identity: what the checkpoint must have been saved with; None: not compared.
        unknown: parts of an identity that the caller has none of, so that they are not compared.

    Raises:
        DamagedCheckpointError: it is missing, incomplete or changed; says which file and how.
        CheckpointError: it has another format, or belongs to another model or configuration; names the differences.
    """
    root = Path(path).absolute()
    recover(root)
    manifest = _read_manifest(root)
    for name, entry in manifest.files.items():
        if fault := _file_fault(root, name, entry.size, entry.sha256):
            raise DamagedCheckpointError(f"checkpoint {root} is damaged: {fault}")
    if identity is not None:
        saved = {key: value for key, value in manifest.identity.items() if key not in unknown}
        _check_identity(root, saved, identity)
    return Checkpoint(root, manifest.step, tuple(manifest.files))


def model_identity(role: str, architecture: str, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What tells a role's model from another: its architecture, the names and shapes of its weights, their number."""
    shapes = sorted((name, tuple(weight.shape)) for name, weight in weights.items())
    total = sum(math.prod(shape) for _, shape in shapes)
    sha = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return {f"{role}.architecture": architecture, f"{role}.parameters": str(total), f"{role}.shapes": sha[:16]}


@dataclass
class VerifyReport:
    """What `verify` found; `problems` is empty for a good checkpoint."""

    path: Path
    step: int | None = None
    files: int = 0
    nbytes: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.path}: " + "; ".join(self.problems)
        size = f"{self.nbytes / 1e6:.1f} MB"
        return f"{self.path}: whole (step {self.step}, {self.files} files, {size}, {self.tensors} tensors, all finite)"


def verify(path: str | Path) -> VerifyReport:
    """Check a checkpoint through: digests, every tensor loaded and finite, JSON and tables readable."""
    report = VerifyReport(Path(path))
    try:
        checkpoint = load_checkpoint(path)
        report.step, report.files = checkpoint.step, len(checkpoint.files)
        report.nbytes = sum((checkpoint.path / name).stat().st_size for name in checkpoint.files)
        for name in checkpoint.files:
            if name.endswith(".json"):
                checkpoint.json(name)
            elif name.endswith(".parquet"):
                checkpoint.batch(name)
        for stem in sorted({name.rpartition("-")[0] for name in checkpoint.files if name.endswith(".safetensors")}):
            for shard in checkpoint.shards(stem):
                report.tensors += 1
                if not is_finite(shard.tensor):
                    report.problems.append(f"tensor '{shard.name}' of {stem} has values that are not finite")
    except CheckpointError as error:
        report.problems.append(str(error))
    return report


def _may_replace(path: Path) -> bool:
    """Whether a checkpoint may take the place: nothing is there, an empty directory, or a checkpoint."""
    try:
        if os.path.lexists(path) and any(path.iterdir()):
            read_json(path / MANIFEST, _Manifest)  # others have a file of that name, too
    except (OSError, ValueError):
        return False
    return True


def _read_manifest(root: Path) -> _Manifest:
    file = root / MANIFEST
    if not root.is_dir():
        raise DamagedCheckpointError(f"there is no checkpoint at {root}")
    if file.is_symlink() or not file.is_file():
        raise DamagedCheckpointError(f"{root} is no checkpoint, or a damaged one: it has no {MANIFEST}")
    try:
        content = read_json(file, dict[str, Any])
        signed = {key: value for key, value in content.items() if key != "digest"}
        if file.read_bytes() == dump_manifest(content) and content.get("digest") == manifest_digest(signed):
            CHECKPOINT.check(read_json(file, _AnyManifest).format, f"checkpoint {root}")
            manifest: _Manifest = read_json(file, _Manifest)
            if manifest.model_dump() == content:
                return manifest
    except (OSError, ValueError):
        pass
    raise DamagedCheckpointError(f"checkpoint {root} is damaged: {MANIFEST} has been cut or changed")


def _file_fault(root: Path, name: str, size: int, sha256: str) -> str | None:
    """What is wrong with a file of a manifest, if anything."""
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
        if digest(descriptor) != sha256:
            return f"the content of '{name}' has changed (its SHA-256 differs)"
    finally:
        os.close(descriptor)
    return None


def _check_identity(root: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    differences = [
        f"{key} is {_quoted(saved.get(key))} there and {_quoted(wanted.get(key))} here"
        for key in sorted({*saved, *wanted})
        if saved.get(key) != wanted.get(key)
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint {root} belongs to another model or configuration: {'; '.join(differences)}. Use the model and "
            "configuration it was made with, or start anew"
        )


def _quoted(value: str | None) -> str:
    return "not given" if value is None else f"'{value}'"
