"""The checkpoints of a run: when one is saved, which are kept, and which is the one to go on from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl._base.checked import checked
from verl._base.durable import clear_staging, link_atomic, remove, staging_of
from verl._base.record import Count
from verl.checkpoint import state
from verl.checkpoint.store import MANIFEST, Checkpoint, SaveResult, Saving, load_checkpoint, reason
from verl.cluster.controller import start
from verl.errors import CheckpointError, ConfigError, DamagedCheckpointError, VerlError

if TYPE_CHECKING:
    from verl.data.prefetch import Loader
    from verl.trainer.loop import Loop
    from verl.trainer.options import CheckpointOptions

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{6}|[1-9]\d{6,})")


class CheckpointStore:
    """The checkpoints of a run: `step-<number>` directories and a link `latest`, the newest `keep` of them kept (None:
    all).

    One process at a time may use it (`run_dir` locks the run). Construction clears the leftovers of a crash.
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
                if entry.name[5:].isdecimal() and not _STEP.fullmatch(entry.name):
                    logger.warning(
                        "%s is passed over: a checkpoint of that step has another name; is it a copy?", entry
                    )

    @staticmethod
    def holds(directory: Path) -> bool:
        """Whether there are checkpoints in a directory, damaged ones included."""
        return any(entry.is_dir() and _STEP.fullmatch(entry.name) for entry in directory.glob("step-*"))

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, damaged ones included, ascending."""
        named = ((_STEP.fullmatch(entry.name), entry) for entry in self.directory.glob("step-*"))
        return sorted(int(match[1]) for match, entry in named if match and entry.is_dir())

    def begin(
        self,
        step: int,
        files: Mapping[str, Any],
        identity: Mapping[str, str] | None = None,
        writers: Sequence[state.RoleWriter] = (),
    ) -> Saving:
        """Begin to save a checkpoint under the step's name; older checkpoints go once this one is safe.

        Raises:
            CheckpointError: a name or a content that a checkpoint cannot hold; nothing has changed then.
        """

        def end(result: SaveResult) -> None:
            if not result:
                logger.warning("%s; training goes on, earlier checkpoints are untouched", result.error)
                return
            link_atomic(self.directory / "latest", self.path(step).name)
            self.prune(step)

        # Under the store's own names even a directory that has lost its manifest is a checkpoint, to be replaced.
        return Saving(self.path(step), step, files, identity or {}, writers, end)

    def prune(self, step: int) -> None:
        """Remove all but the newest `keep` and the last `reach` steps' checkpoints; never the one of `step`, which was
        saved last."""
        try:
            steps = self.steps()
            # A guard may roll back `reach` steps: the newest checkpoint at least that old stays, and all after it.
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
            path = self.path(step)
            try:
                if path.is_symlink():
                    raise DamagedCheckpointError(f"checkpoint {path} is damaged: it is a symbolic link")
                checkpoint = load_checkpoint(path, identity)
                if checkpoint.step != step:
                    raise checkpoint.damaged(f"{MANIFEST} says step {checkpoint.step}")
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
        # The store clears what has the new name when it is next opened.
        doomed = staging_of(path)
        os.rename(path, doomed)
        remove(doomed)


class AutomaticCheckpoints:
    """`step-<number>` directories of a trainer, the newest of which is always the one to go on from.

    Args:
        directory: where they are.
        every: steps from one to the next.
        keep: how many are kept, the newest; None: all.
        background: tensors are copied to host memory and written while training goes on, one save at a time.
    """

    def __init__(self, directory: str | Path, every: int, keep: int | None, background: bool) -> None:
        self.every, self.store = every, CheckpointStore(directory, keep)
        self._background = background
        #: The save that is under way.
        self.pending: Saving | None = None
        #: The step that was saved or loaded last.
        self.saved: int | None = None

    @classmethod
    def of(cls, options: CheckpointOptions) -> AutomaticCheckpoints | None:
        """None where neither directory nor frequency is given.

        Raises:
            ConfigError: one is given without the other.
        """
        directory, every, keep = options.checkpoint_dir, options.save_every, options.keep_checkpoints
        if directory is not None and every is not None:
            return cls(directory, every, keep, options.async_save)
        if directory is not None or every is not None:
            raise ConfigError(
                "automatic checkpoints need both checkpoint_dir=... and save_every=..., where and how often: give the "
                "other too, or call save_checkpoint(path) yourself"
            )
        if keep is not None or options.async_save:
            name = "async_save" if keep is None else "keep_checkpoints"
            raise ConfigError(f"{name} is of automatic checkpoints: give checkpoint_dir= and save_every=")
        return None

    def save(self, trainer: Loop, *, last: bool = False) -> str | None:
        """Save the present step, unless that is done, or in the background begin to.

        Args:
            last: it is waited for.

        Returns:
            Why the disk did not take it, which is also logged.
        """
        with trainer.runner.models.hold():
            if trainer.steps not in (self.saved, self.pending and self.pending.step):
                self.finish()
                start()
                contents = state.contents(trainer, background=self._background)
                self.pending = self.store.begin(trainer.steps, *contents)
            return self.finish(wait=last or not self._background)

    def finish(self, *, wait: bool = True) -> str | None:
        """End the save that is under way, if there is one and it is done or waited for; returns as `save`.

        Raises:
            CheckpointError: a content that a checkpoint cannot hold, such as a tensor that is not finite.
        """
        saving, self.pending = self.pending, None  # a save that raises is over: it is not polled again
        result = None if saving is None else saving.poll(wait=wait)
        if saving is None or result is None:
            self.pending = saving
            return None
        self.saved = saving.step if result else self.saved
        return result.error

    def close(self) -> None:
        """End the save that is under way; a failure is logged."""
        try:
            self.finish()
        except VerlError as error:
            logger.warning("the last checkpoint was not saved: %s", error)

    def resume(self, trainer: Loop, data: Loader | None = None, step: int | None = None) -> int | None:
        """See `Trainer.resume`; with a `step`, `Trainer.rollback`."""
        self.finish()
        start()
        identity, check = state.identity(trainer), partial(state.check, trainer, data=data)
        if step is None:
            checkpoint = self.store.load(identity, check)
        else:
            check(checkpoint := load_checkpoint(self.store.path(step), identity))
        if checkpoint is None:
            return None
        state.restore(trainer, checkpoint)
        self.store.rollback(checkpoint.step)
        self.saved = checkpoint.step
        return self.saved

    def before(self, step: int) -> int:
        """The newest checkpoint that is not after `step`, or the oldest one.

        Raises:
            CheckpointError: the directory has no checkpoint.
        """
        self.finish()
        steps = self.store.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.store.directory} to go back to")
        return max((saved for saved in steps if saved <= step), default=steps[0])

    def last_good(self, trainer: Loop) -> int | None:
        """The step of the newest checkpoint that did not come right after a skipped update."""
        self.finish()
        for step in reversed(self.store.steps()):
            try:
                if not state.check(trainer, load_checkpoint(self.store.path(step), state.identity(trainer))).skipped:
                    return step
            except CheckpointError as error:
                logger.warning("%s; looking at the one before it", error)
        return None
