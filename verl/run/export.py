"""From a checkpoint to a plain Hugging Face directory, which everything else reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig

from verl._base.durable import publish, staging_of, try_remove
from verl._base.schemas import check_run_schema
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.store import MANIFEST, TOKENIZER, Checkpoint, load_checkpoint
from verl.checkpoint.verify import rebuild
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
    checkpoint = find_checkpoint(path, lambda whole: rebuilt.update({whole.path: rebuild(whole)}))
    if out.resolve().is_relative_to(checkpoint.path.resolve()):
        raise ConfigError(f"{out} lies in the checkpoint, which its run may replace: name a directory elsewhere")
    first_model, first_tokenizer, trust = _origin(checkpoint)
    origin = first_tokenizer or first_model
    if tokenizer is None and origin is None:
        raise ModelError("the checkpoint does not say which model it began with: name the tokenizer, --tokenizer")
    try:
        reader = load_tokenizer(tokenizer or str(origin), trust_remote_code=trust)
    except ModelError as error:
        if tokenizer is not None:
            raise
        raise ModelError(f"{error}. Name the tokenizer's directory with --tokenizer") from error
    model, fault = rebuilt[checkpoint.path]
    if fault is not None:
        raise CheckpointError(f"checkpoint {checkpoint.path}: {fault}; nothing was written")
    if first_model is not None and hasattr(model, "generation_config"):
        # Sampling defaults and end tokens are not in checkpoints; without a file the architecture's stay.
        with suppress(OSError, ValueError):
            model.generation_config = GenerationConfig.from_pretrained(first_model)
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
        CheckpointError: no checkpoint is complete.
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


def _origin(checkpoint: Checkpoint) -> tuple[str | None, str | None, bool]:
    """The model that training began with, its tokenizer, and whether code of theirs is run: by the settings of the
    run, else by the model's own name."""
    config: dict[str, Any] = checkpoint.json("actor/config.json", dict[str, Any])
    name = config.get("_name_or_path")
    saved = checkpoint.path / TOKENIZER
    tokenizer = str(saved) if saved.is_dir() else None
    settings = checkpoint.path.resolve().parent.parent / "config.yaml"
    if not settings.is_file():
        return (name if isinstance(name, str) and name else None), tokenizer, False
    model = load_config(settings).actor_rollout_ref.model
    return model.path, tokenizer or model.tokenizer, model.trust_remote_code
