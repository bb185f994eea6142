"""A trainer's automatic checkpoints: when they are saved, resume and rollback."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl.controller.controller import start
from verl.errors import CheckpointError, ConfigError
from verl.trainer import state
from verl.trainer.checkpoint import Checkpoint, CheckpointStore, load_checkpoint
from verl.trainer.task import check_counts

if TYPE_CHECKING:
    from verl.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_ALL = 2**62


class AutomaticCheckpoints:
    """`step-<number>` directories of a trainer, the newest of which is always the one to go on from.

    Args:
        directory: where they are.
        every: steps from one to the next.
        keep: how many are kept, the newest; None: all.
    """

    def __init__(self, directory: str | Path, every: int, keep: int | None) -> None:
        check_counts(1, save_every=every, keep_checkpoints=keep)
        self.every, self.store = every, CheckpointStore(directory, _ALL if keep is None else keep)
        #: The step that was saved or loaded last.
        self.saved: int | None = None

    @classmethod
    def of(cls, directory: str | Path | None, every: int | None, keep: int | None) -> AutomaticCheckpoints | None:
        """None where neither directory nor frequency is given.

        Raises:
            ConfigError: one is given without the other.
        """
        if directory is not None and every is not None:
            return cls(directory, every, keep)
        if directory is not None or every is not None:
            raise ConfigError(
                "automatic checkpoints need both checkpoint_dir=... and save_every=..., where and how often: give the "
                "other too, or call save_checkpoint(path) yourself"
            )
        if keep is not None:
            raise ConfigError("keep_checkpoints is of automatic checkpoints: give checkpoint_dir= and save_every=")
        return None

    def save(self, trainer: Trainer) -> str | None:
        """Save the present step, unless that is done; returns why the disk did not take it, which is also logged."""
        if self.saved == trainer.steps:
            return None
        start()
        result = self.store.begin(trainer.steps, *state.contents(trainer)).wait()
        self.saved = trainer.steps if result else self.saved
        return result.error

    def resume(self, trainer: Trainer) -> int | None:
        """See `Trainer.resume`."""
        start()
        checkpoint = self.store.load(state.identity(trainer), partial(state.check, trainer))
        if checkpoint is None:
            return None
        self._restore(trainer, checkpoint)
        return checkpoint.step

    def rollback(self, trainer: Trainer, step: int) -> None:
        """See `Trainer.rollback`."""
        start()
        found = load_checkpoint(self.store.path(step), state.identity(trainer))
        state.check(trainer, found)
        self._restore(trainer, found)

    def last_good(self, trainer: Trainer) -> int | None:
        """The step of the newest checkpoint that did not come right after a skipped update."""
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
