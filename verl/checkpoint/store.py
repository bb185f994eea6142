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
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from pydantic import BaseModel, Field, NonNegativeInt

from verl.batch import Batch
from verl.checked import checked
from verl.checkpoint.saving import (
    MANIFEST,
    NAME,
    SaveResult,
    Saving,
    Writer,
    dump_manifest,
    manifest_digest,
    reason,
)
from verl.durable import (
    clear_staging,
    digest,
    link_atomic,
    read_json,
    recover,
    remove,
    staging_of,
)
from verl.errors import CheckpointError, DamagedCheckpointError, DataError
from verl.record import Natural
from verl.schemas import CHECKPOINT
from verl.weights.shard import Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{6,})")


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
        return name in self.files or bool(self._tensor_files(str(name)))

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
        from verl.weights.tensor_files import read_shards

        return read_shards(self.paths(name))

    def paths(self, name: str) -> list[Path]:
        """The files of the tensors stored under `name`."""
        files = self._tensor_files(name)
        if not files:
            raise self._absent(name)
        return [self.path / file for file in files]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors stored under `name`, all at once; copies."""
        return {shard.name: shard.tensor.clone() for shard in self.shards(name)}

    def damaged(self, fault: str) -> DamagedCheckpointError:
        """The error that says what is wrong with the content."""
        return DamagedCheckpointError(f"checkpoint {self.path} is damaged: {fault}")

    def _tensor_files(self, name: str) -> list[str]:
        from verl.weights.tensor_files import files_of

        return files_of(name, self.files)

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise self._absent(name)
        return self.path / name

    def _absent(self, name: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path} holds no '{name}'; it holds {', '.join(self.files)}")


class CheckpointStore:
    """The checkpoints of a run: `step-<number>` directories and a link `latest`, the newest `keep` of them kept.

    Not for two processes at a time (`run_dir` locks the run). What a crash left half done is cleared when the store
    is made.
    """

    @checked
    def __init__(self, directory: str | Path, keep: Annotated[int, Field(ge=1)] = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"at least one checkpoint must be kept, not {keep}")
        self.directory = Path(directory)
        self.keep = keep
        #: Steps that must lie between the newest checkpoint and one that is kept besides.
        self.reach = 0
        if self.directory.is_dir():
            clear_staging(self.directory)

    @staticmethod
    def holds(directory: Path) -> bool:
        """Whether there are checkpoints in a directory, damaged ones included."""
        return bool(_steps(directory))

    def path(self, step: int) -> Path:
        return self.directory / _name(step)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, damaged ones included, ascending."""
        return _steps(self.directory)

    def save(self, step: int, files: Mapping[str, Any], identity: Mapping[str, str] | None = None) -> SaveResult:
        """`save_checkpoint` under the step's name; older checkpoints go once this one is safe.

        Raises:
            CheckpointError: a name or a content that a checkpoint cannot hold; nothing has changed then.
        """
        return self.begin(step, files, identity).wait()

    def begin(
        self,
        step: int,
        files: Mapping[str, Any],
        identity: Mapping[str, str] | None = None,
        writers: Sequence[Writer] = (),
    ) -> Saving:
        """Begin `save`."""

        def end(result: SaveResult) -> None:
            if not result:
                logger.warning("%s; training goes on, earlier checkpoints are untouched", result.error)
                return
            link_atomic(self.directory / "latest", self.path(step).name)
            self.prune(step)

        # Under the store's own names even a directory that has lost its manifest is a checkpoint, to be replaced.
        return Saving(self.path(step), step, files, identity or {}, writers, end)

    def prune(self, step: int) -> None:
        """Remove all but the newest `keep` and those from `reach` steps before on; never that of `step`, the last one
        saved."""
        try:
            steps = self.steps()
            far = [saved for saved in steps if saved <= steps[-1] - self.reach][-1:] or steps[:1]
            for old in steps[: -self.keep]:
                if old != step and not (self.reach and old >= far[0]):
                    self._discard(self.path(old))
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.directory, error)

    def load(
        self, identity: Mapping[str, str] | None = None, check: Callable[[Checkpoint], object] | None = None
    ) -> Checkpoint | None:
        """The newest whole checkpoint (None: there is no checkpoint at all).

        Args:
            check: raises DamagedCheckpointError for content that is wrong; then the checkpoint before is taken.

        Raises:
            CheckpointError: it belongs to another model or configuration; none is whole.
        """
        skipped: list[str] = []
        self._tell_others()
        for step in reversed(self.steps()):
            try:
                checkpoint = self._open(step, identity)
                if check is not None:
                    check(checkpoint)
                return checkpoint
            except DamagedCheckpointError as error:
                skipped.append(str(error))
                logger.warning("%s; taking the one before it", error)
        if skipped:
            raise DamagedCheckpointError(
                f"no checkpoint is whole: {'; '.join(skipped)}. Put one back from a copy, or start anew (--fresh)"
            )
        return None

    def _tell_others(self) -> None:
        for entry in self.directory.glob("step-*"):
            if (match := _STEP.fullmatch(entry.name)) and entry.name != self.path(int(match[1])).name:
                logger.warning("%s is passed over: a checkpoint of that step has another name; is it a copy?", entry)

    def _open(self, step: int, identity: Mapping[str, str] | None) -> Checkpoint:
        path = self.path(step)
        if path.is_symlink():
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: it is a symbolic link")
        checkpoint = load_checkpoint(path, identity)
        if checkpoint.step != step:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {MANIFEST} says step {checkpoint.step}")
        return checkpoint

    def rollback(self, step: int) -> None:
        """Remove every checkpoint after `step`, damaged ones included, so that the newest is the one to go on from.

        The newest goes first: a crash in between leaves fewer checkpoints, and no gap among them.

        Raises:
            CheckpointError: there is no checkpoint of `step` (nothing is removed then), or the disk refuses.
        """
        steps = self.steps()
        if step not in steps:
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step} to go back to; it has {steps}")
        try:
            for later in reversed([saved for saved in steps if saved > step]):
                self._discard(self.path(later))
        except OSError as error:
            raise CheckpointError(
                f"checkpoints after step {step} in {self.directory} cannot be removed: {reason(error)}; remove them "
                "by hand before the run goes on"
            ) from None
        link_atomic(self.directory / "latest", self.path(step).name)

    def _discard(self, path: Path) -> None:
        # Renamed first: a crash amid the deletion leaves no half checkpoint under a real name.
        doomed = staging_of(path)
        os.rename(path, doomed)
        remove(doomed)


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
    from verl.weights.tensor_files import is_finite

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


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    matches = ((_STEP.fullmatch(entry.name), entry) for entry in directory.iterdir())
    return sorted(
        int(match[1]) for match, entry in matches if match and entry.name == _name(int(match[1])) and entry.is_dir()
    )


def _may_replace(path: Path) -> bool:
    """Whether a checkpoint may take the place: nothing is there, an empty directory, or a checkpoint."""
    if not os.path.lexists(path):
        return True
    try:
        if not any(path.iterdir()):
            return True
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
