"""The checkpoints of a run: which are kept, and which is the one to go on from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl._base.checked import checked
from verl._base.durable import clear_staging, link_atomic, remove, staging_of
from verl._base.record import Count
from verl.checkpoint.saving import MANIFEST, SaveResult, Saving, Writer, reason
from verl.checkpoint.store import Checkpoint, load_checkpoint
from verl.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{6,})")


class CheckpointStore:
    """The checkpoints of a run: `step-<number>` directories and a link `latest`, the newest `keep` of them kept (None:
    all).

    Not for two processes at a time (`run_dir` locks the run). What a crash left half done is cleared when the store
    is made.
    """

    @checked
    def __init__(self, directory: str | Path, keep: Count | None = 2) -> None:
        self.directory = Path(directory)
        self.keep = keep
        #: Steps that must lie between the newest checkpoint and one that is kept besides.
        self.reach = 0
        if self.directory.is_dir():
            clear_staging(self.directory)
            for entry in self.directory.glob("step-*"):
                if (match := _STEP.fullmatch(entry.name)) and entry.name != self.path(int(match[1])).name:
                    logger.warning(
                        "%s is passed over: a checkpoint of that step has another name; is it a copy?", entry
                    )

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
            for old in steps[: -self.keep] if self.keep else ():
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


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    matches = ((_STEP.fullmatch(entry.name), entry) for entry in directory.iterdir())
    return sorted(
        int(match[1]) for match, entry in matches if match and entry.name == _name(int(match[1])) and entry.is_dir()
    )
