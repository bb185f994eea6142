"""The base of a role's adapters: read from files that stay where they are, so that checkpoints hold what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.errors import CheckpointError
from verl.models.source import ModelFiles


@dataclass(frozen=True)
class LoraBase:
    """The files of a base.

    Attributes:
        trained: names of the weights beside it.
    """

    files: ModelFiles
    trained: tuple[str, ...]

    @classmethod
    def of(cls, files: Any, model: Any) -> LoraBase | None:
        """That of a model with adapters; None: it was not read from files."""
        if not isinstance(files, ModelFiles):
            return None
        return cls(files, tuple(name for name, weight in model.named_parameters() if weight.requires_grad))

    def saved(self) -> dict[str, str]:
        """The base as checkpoints name it."""
        return {"path": self.files.path, "sha256": str(self.files.digest)}


def check_base(saved: dict[str, str], base: LoraBase | None) -> None:
    """Raises CheckpointError: the base that a checkpoint names is not this one."""
    if base is None or base.files.digest != saved["sha256"]:
        here = "a model that was not read from files" if base is None else base.files.path
        raise CheckpointError(
            f"the checkpoint holds adapters alone, of the base that was at {saved['path']}; here they would be added "
            f"to {here}, whose files differ: give model.path the base of then"
        )
