"""An exported model is opened again and compared with the live one."""

from __future__ import annotations

import logging
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from verl._host import device
from verl.errors import ModelError
from verl.models.heads import ValueModel
from verl.models.int4 import Int4Linear, weight_bytes
from verl.models.loading import load_model
from verl.models.lora import merged_shards
from verl.models.outputs import outputs, probe_tokens
from verl.models.source import ModelFiles

logger = logging.getLogger(__name__)

#: What rounding explains: the mean of |differences| of log-probs, or of values.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF = 0.2


def check_export(model: Any, path: Path, *, adapter: bool = False) -> None:
    """Compare a directory that was written with the live model: log-probs (or values) on a probe where a second model
    fits into memory, else tensor by tensor. Whatever cannot be compared, or gets lost, is logged.

    Args:
        model: whole, with the weights that were written.
        adapter: the directory holds adapters alone: they are compared over the base that they name.

    Raises:
        ModelError: the directory is another model.
    """
    # A second model with the probe's activations, and the copy of a layer.
    needed = 1.2 * (
        weight_bytes(model) + 4 * sum(m.codes.numel() for m in model.modules() if isinstance(m, Int4Linear))
    )
    fits = needed < device.free_memory("cpu")
    if adapter:
        _check_adapter(model, path, fits)
    elif fits:
        _check_gap(model, load_model(path, **_form(model)), str(path))
    else:
        _check_tensors(model, path)
        logger.info("%s: all tensors are the live model's; outputs, for %.1f GB, not compared", path, needed / 1e9)


def _check_adapter(model: Any, path: Path, fits: bool) -> None:
    """Raises ModelError: over the base that it names it is not the live model."""
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
    try:
        if not base or isinstance(model, ValueModel) or not fits:
            raise ModelError("it is not named, has another head, or does not fit beside it")
        plain = load_model(base, **_form(model))
    except ModelError as error:
        logger.warning("%s was not compared with the live model, its base is not at hand: %s", path, error)
        return
    there, here = (each.config.get_text_config().vocab_size for each in (plain, model))
    if there != here:
        plain.resize_token_embeddings(here)
    again = PeftModel.from_pretrained(plain, str(path), autocast_adapter_dtype=False)
    what, tokens = f"{path} over {base}", f"its base embeds {there} tokens and this model {here}"
    if there == here and any(isinstance(module, Int4Linear) for module in model.modules()):
        logger.warning(
            "%s: in full precision log-probs differ from those of the trained model, whose base is in int4, by %.3g on "
            "average and %.3g at most: export the merged model if that is too much",
            *(what, *_gap(model, again)),
        )
        return
    try:
        _check_gap(model, again, what)
    except ModelError as error:
        if there == here:
            raise
        raise ModelError(
            f"{what}: {tokens}, and the rows that were added are in no adapter: write the model whole, or train them "
            "with the adapters (modules_to_save)"
        ) from error
    if there != here:
        logger.warning("%s: %s: call resize_token_embeddings(%d) on the base before peft loads", what, tokens, here)


def _check_gap(model: Any, again: Any, what: str) -> None:
    mean, most = _gap(model, again)
    allowed = _TOLERANCE.get(getattr(model, "backbone", model).dtype, _HALF)
    if not mean <= allowed:
        raise ModelError(
            f"{what} is not the model it was written from: on a probe outputs differ by {mean:.3g} on average and "
            f"{most:.3g} at most, of which rounding explains {allowed:g}"
        )
    logger.info("%s was opened again: on a probe outputs differ by %.3g on average, %.3g at most", what, mean, most)


def _gap(model: Any, again: Any) -> tuple[float, float]:
    """Mean and largest difference of outputs."""
    tokens = probe_tokens(model)
    gap = (outputs(again.to(next(model.parameters()).device), tokens) - outputs(model, tokens)).abs()
    return float(gap.mean()), float(gap.max())


def _check_tensors(model: Any, path: Path) -> None:
    """Raises ModelError: a tensor of the directory differs from the merged model's."""
    stored = ModelFiles(str(path), **_form(model)).stream()
    for live, there in zip_longest(merged_shards(model), stored):
        if live is None or there is None or live.name != there.name or not torch.equal(live.tensor.cpu(), there.tensor):
            name = (live or there).name
            raise ModelError(f"{path} is not the model it was written from: '{name}' differs there, or is not there")


def _form(model: Any) -> dict[str, Any]:
    """In which dtype, and as which kind of model, its files are read."""
    dtype = str(getattr(model, "backbone", model).dtype).removeprefix("torch.")
    return {"dtype": dtype, "kind": "value" if isinstance(model, ValueModel) else "causal"}
