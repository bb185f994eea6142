"""A trainer's automatic checkpoints: when they are saved, resume and rollback."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint import state
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.store import Checkpoint, load_checkpoint
from verl.cluster.controller import start
from verl.errors import CheckpointError, ConfigError, VerlError

if TYPE_CHECKING:
    from verl.checkpoint.saving import Saving
    from verl.data.prefetch import Loader
    from verl.trainer.options import CheckpointOptions
    from verl.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


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
        self._pending: Saving | None = None
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

    def save(self, trainer: Trainer, *, last: bool = False) -> str | None:
        """Save the present step, unless that is done, or in the background begin to.

        Args:
            last: it is waited for.

        Returns:
            Why the disk did not take it, which is also logged.
        """
        with trainer.models_idle():
            if trainer.steps not in (self.saved, self._pending and self._pending.step):
                self.finish()
                start()
                contents = state.contents(trainer, background=self._background)
                self._pending = self.store.begin(trainer.steps, *contents)
            return self.finish(wait=last or not self._background)

    def finish(self, *, wait: bool = True) -> str | None:
        """End the save that is under way, if there is one and it is done or waited for; returns as `save`.

        Raises:
            CheckpointError: a content that a checkpoint cannot hold, such as a tensor that is not finite.
        """
        saving, self._pending = self._pending, None  # a save that raises is over: it is not polled again
        result = None if saving is None else saving.poll(wait=wait)
        if saving is None or result is None:
            self._pending = saving
            return None
        self.saved = saving.step if result else self.saved
        return result.error

    def close(self) -> None:
        """End the save that is under way; a failure is logged."""
        try:
            self.finish()
        except VerlError as error:
            logger.warning("the last checkpoint was not saved: %s", error)

    def resume(self, trainer: Trainer, data: Loader | None = None) -> int | None:
        """See `Trainer.resume`."""
        self.finish()
        start()
        if not self.store.steps():
            return None
        checkpoint = self.store.load(state.identity(trainer), partial(state.check, trainer, data=data))
        if checkpoint is None:
            return None
        self._restore(trainer, checkpoint)
        return checkpoint.step

    def rollback(self, trainer: Trainer, step: int) -> None:
        """See `Trainer.rollback`."""
        self.finish()
        start()
        checkpoint = load_checkpoint(self.store.path(step), state.identity(trainer))
        state.check(trainer, checkpoint)
        self._restore(trainer, checkpoint)

    def before(self, step: int) -> int:
        """The newest checkpoint that is not after `step`, or the oldest one.

        Raises:
            CheckpointError: there is none.
        """
        self.finish()
        steps = self.store.steps()
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.store.directory} to go back to")
        return max((saved for saved in steps if saved <= step), default=steps[0])

    def last_good(self, trainer: Trainer) -> int | None:
        """The step of the newest checkpoint that did not come right after a skipped update."""
        self.finish()
        for step in reversed(self.store.steps()):
            try:
                if not state.check(trainer, load_checkpoint(self.store.path(step), state.identity(trainer))).skipped:
                    return step
            except CheckpointError as error:
                logger.warning("%s; looking at the one before it", error)
        return None

    def _restore(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        state.restore(trainer, checkpoint)
        self.store.rollback(checkpoint.step)
        self.saved = checkpoint.step
