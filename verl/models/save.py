"""A live model as a directory that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from verl.data.chat import ChatTokenizer
from verl.errors import ModelError
from verl.models.heads import ValueModel
from verl.models.lora import merged_shards, save_adapter
from verl.models.probe import check_export
from verl.models.rope import own_positions

#: What an earlier export may have left that this one does not write, and that is read as a part of it.
_TEMPLATES = ("chat_template.*", "additional_chat_templates/*")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def save_pretrained_dir(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    *,
    adapter: bool = False,
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
