"""From a checkpoint to a plain Hugging Face directory, which everything else reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl._base.durable import publish, staging_of, try_remove
from verl._base.schemas import check_run_schema
from verl.checkpoint import state
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.saving import MANIFEST, TOKENIZER
from verl.checkpoint.store import Checkpoint, load_checkpoint
from verl.config import load_config
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.models.loading import load_tokenizer
from verl.models.save import save_pretrained_dir


def export(path: str | Path, out: str | Path, tokenizer: str | None = None, *, adapter: bool = False) -> Checkpoint:
    """Write the actor of a checkpoint with its tokenizer as a Hugging Face directory, whole or not at all; returns the
    checkpoint it came from.

    Args:
        path: a checkpoint, or a run's directory: then its newest whole checkpoint.
        out: a directory that is not there yet, or an empty one.
        tokenizer: its directory or hub name; None: the checkpoint's.
        adapter: write the adapters alone, as peft reads them; else adapters are merged into the weights.

    Raises:
        CheckpointError: there is no whole checkpoint, its model's outputs are not those noted at the save, or the disk
            does not take the directory.
        ConfigError: `out` is taken.
        ModelError: there is no tokenizer, or (`adapter`) the model has no adapters.
    """
    out = Path(out).absolute()
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out} is there already and not empty: name a directory that is not there yet")
    rebuilt: dict[Path, tuple[Any, str | None]] = {}
    checkpoint = find_checkpoint(path, lambda whole: rebuilt.update({whole.path: state.rebuild(whole)}))
    if out.resolve().is_relative_to(checkpoint.path.resolve()):
        raise ConfigError(f"{out} lies in the checkpoint, which its run may replace: name a directory elsewhere")
    origin = _Origin(checkpoint)
    reader = origin.tokenizer(tokenizer)
    model, fault = rebuilt[checkpoint.path]
    if fault is not None:
        raise CheckpointError(f"checkpoint {checkpoint.path}: {fault}; nothing was written")
    origin.give_generation_config(model)
    staging = staging_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try_remove(staging)
        save_pretrained_dir(model, reader, staging, adapter=adapter)
        publish(staging, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out} was not written: {error}; free space or name another directory") from error
    finally:
        try_remove(staging)
    return checkpoint


def find_checkpoint(path: str | Path, check: Callable[[Checkpoint], object]) -> Checkpoint:
    """The checkpoint at a path, or the newest whole one of the run at a path; see `CheckpointStore.load` for `check`.

    Raises:
        CheckpointError: there is none, or none is whole.
        ConfigError: the run is of another version of verl, in a form that is not read.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        checkpoint = load_checkpoint(path)
        check(checkpoint)
        return checkpoint
    if CheckpointStore.holds(path / "checkpoints"):
        check_run_schema(path)
    for directory in (path / "checkpoints", path):
        if CheckpointStore.holds(directory):
            newest = CheckpointStore(directory).load(check=check)
            assert newest is not None
            return newest
    what = "a run without a checkpoint yet" if (path / "config.yaml").is_file() else "neither a checkpoint nor a run"
    there = "" if path.exists() else " (nothing is there)"
    raise CheckpointError(
        f"{path} is {what}{there}: name a run's directory, such as runs/latest, or a checkpoint in it"
    )


class _Origin:
    """The model that the training of a checkpoint began with: by the settings of its run, else by its own name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config: dict[str, Any] = checkpoint.json("actor/config.json", dict[str, Any])
        name = config.get("_name_or_path")
        self._model, self._trust = (name if isinstance(name, str) and name else None), False
        saved = checkpoint.path / TOKENIZER
        self._tokenizer = str(saved) if saved.is_dir() else None
        settings = checkpoint.path.resolve().parent.parent / "config.yaml"
        if settings.is_file():
            model = load_config(settings).actor_rollout_ref.model
            self._model, self._tokenizer = model.path or self._model, self._tokenizer or model.tokenizer
            self._trust = model.trust_remote_code

    def tokenizer(self, name_or_path: str | None) -> PreTrainedTokenizerBase:
        """The tokenizer that is given, or that training began with."""
        name = name_or_path or self._tokenizer or self._model
        if name is None:
            raise ModelError("the checkpoint does not say which model it began with: name the tokenizer, --tokenizer")
        try:
            return load_tokenizer(name, trust_remote_code=self._trust)
        except ModelError as error:
            if name_or_path is not None:
                raise
            raise ModelError(f"{error}. Name the tokenizer's directory with --tokenizer") from error

    def give_generation_config(self, model: Any) -> None:
        """Sampling defaults and end tokens, which checkpoints do not hold, where the first model can still be read."""
        if self._model is None or not hasattr(model, "generation_config"):
            return
        try:
            model.generation_config = GenerationConfig.from_pretrained(self._model)
        except (OSError, ValueError):  # it has none, or is gone: those of the architecture stay
            return
