"""A live model as a directory that others read, opened again and compared with the live one."""

from __future__ import annotations

import json
import logging
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from verl._host import device
from verl.data.chat import ChatTokenizer
from verl.errors import ModelError
from verl.models.heads import ValueModel
from verl.models.int4 import Int4Linear, weight_bytes
from verl.models.loading import load_model
from verl.models.lora import merged_shards, save_adapter
from verl.models.outputs import outputs, probe_tokens
from verl.models.rope import own_positions
from verl.models.source import ModelFiles

logger = logging.getLogger(__name__)

#: What an earlier export may have left that this one does not write, and that is read as a part of it.
_TEMPLATES = ("chat_template.*", "additional_chat_templates/*")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def save_pretrained_dir(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, path: str | Path, *, adapter: bool = False
) -> None:
    """Write a plain Hugging Face directory: `config.json`, safetensors weights, and the tokenizer's files; it is opened
    again and compared with the model, see `check_export`.

    Adapters are merged into the weights that are written. A `ValueModel` is written as a token classifier with one
    label. An earlier export in the directory is replaced.

    Args:
        adapter: write the adapters alone, as a directory that peft loads.

    Raises:
        ModelError: `adapter`, and the model has no adapters; there can be no such directory; it holds a model and
            `adapter` is set, or adapters and it is not; transformers refuses the model; or the files are another model.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"the model cannot be written to {path}: {error}") from error
    _clear(path, adapter, () if tokenizer is None else _TEMPLATES)
    try:
        with own_positions(model.config):
            if adapter:
                save_adapter(model, path)
            elif isinstance(model, ValueModel):
                _save_classifier(model, path)
            else:
                _save_merged(model, path)
    except ValueError as error:  # settings of generation that contradict each other, in a model made in Python
        raise ModelError(f"transformers does not write {type(model).__name__} to {path}: {error}") from error
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
        if (settings := path / "generation_config.json").is_file():
            _name_turn_end(tokenizer, settings)
    check_export(model, path, adapter=adapter)


def _clear(path: Path, adapter: bool, leftovers: tuple[str, ...]) -> None:
    """Remove the files of an earlier export. Raises ModelError for an export of the other kind: both would be read."""
    there, kind = ("config.json", "a model") if adapter else ("adapter_config.json", "adapters of peft")
    if (path / there).is_file():
        raise ModelError(
            f"{path} holds {kind} ({there}), and what reads it would put adapters over a model: name another directory"
        )
    for pattern in leftovers if adapter else (*leftovers, *_WEIGHTS):
        for file in path.glob(pattern):
            file.unlink()


def _save_merged(model: Any, path: Path) -> None:
    before = getattr(model, "_hf_peft_config_loaded", False)
    model._hf_peft_config_loaded = False  # else transformers writes the adapters alone
    try:
        model.save_pretrained(path, state_dict={shard.name: shard.tensor for shard in merged_shards(model)})
    finally:
        model._hf_peft_config_loaded = before


def _name_turn_end(tokenizer: PreTrainedTokenizerBase, settings: Path) -> None:
    """Have other engines stop where generation does here: also at the token that ends a reply in the chat template."""
    config, end = json.loads(settings.read_text()), ChatTokenizer(tokenizer).turn_end
    named = config.get("eos_token_id")
    ends = [named] if isinstance(named, int) else list(named or [])
    if end is not None and end not in ends:
        settings.write_text(json.dumps({**config, "eos_token_id": [*ends, end]}, indent=2) + "\n")


def _save_classifier(model: ValueModel, path: Path) -> None:
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_labels = 1
    config.architectures = [type(model.backbone).__name__.removesuffix("Model") + "ForTokenClassification"]
    config.save_pretrained(path)
    weights = {shard.name: shard.tensor.contiguous() for shard in merged_shards(model)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


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
    # What rounding explains: the mean of |differences| of log-probs, or of values.
    allowed = {torch.float64: 1e-6, torch.float32: 1e-3}.get(getattr(model, "backbone", model).dtype, 0.2)
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
