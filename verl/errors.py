"""Errors by the boundary at which they arise.

Every message says what happened, where (file, line, key, row, role) and what to do. A bad sample is
data (the row abstains), not an exception; what is raised here ends the work that asked for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VerlError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(VerlError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another; raised before anything starts."""


class DataError(VerlError, ValueError):
    """A data set, a row or a column is not what the work needs."""


class ModelError(VerlError, ValueError):
    """A model or tokenizer is missing, is not one, or cannot do what is asked of it."""


class RewardError(VerlError, RuntimeError):
    """A reward function is unusable, or fails so often that training on it would be meaningless."""


class RolloutError(VerlError, RuntimeError):
    """Generation cannot be done: a request that can never fit, an engine that died."""


class TrainingError(VerlError, RuntimeError):
    """Training cannot go on: losses stay non-finite, the state is inconsistent."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or belongs to another model or configuration."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, has changed, or does not pass its schema; an older one may be good."""


class SandboxError(VerlError, RuntimeError):
    """Generated code cannot be run in isolation here, so it is not run."""


class ClusterError(VerlError, RuntimeError):
    """Placement, start-up or communication of workers failed; a deadline passed."""


class BrokenCollectiveError(ClusterError):
    """A rank waited in vain for another one, which died, failed or is late."""


def shown(value: object, most: int = 60) -> str:
    """How a message shows a user's value: its repr, cut, on one line; its type where the repr fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # as of an integer of more digits than Python writes
        text = f"such a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: object, known: Iterable[str]) -> str:
    """The phrase that ends an unknown-name message: the nearest valid name, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name if isinstance(name, str) else shown(name), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(names) if names else "none is known here"
