"""What is written into a directory that holds an earlier export."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.models.test_lora import adapted
from tests.training.cases import tiny_model
from verl.errors import ModelError
from verl.models.heads import ValueModel
from verl.models.loading import load_model
from verl.models.save import save_pretrained_dir
from verl.weights.shard import checksum
from verl.weights.shards import model_shards


def word_tokenizer(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("head", ["causal", "value"])
def test_an_export_over_a_larger_one_is_what_it_is_alone(head: str, tmp_path: Path) -> None:
    """An index of shards that are gone, or a template of another tokenizer, would be read as a part of it."""
    old, alone = tmp_path / "old", tmp_path / "alone"
    tiny_model("llama").save_pretrained(old, max_shard_size="10KB")
    word_tokenizer({"default": "{{ messages }}", "tool_use": "{{ tools }}"}).save_pretrained(old)
    (old / "notes.txt").write_text("of the user")
    assert (old / "model.safetensors.index.json").is_file() and (old / "additional_chat_templates").is_dir()
    model = tiny_model("llama") if head == "causal" else ValueModel.from_model(tiny_model("llama"))
    for path in (old, alone):
        save_pretrained_dir(model, word_tokenizer(None), path)
    left = files(old)
    assert left.pop("notes.txt") == b"of the user"
    if head == "value":  # a backbone has no settings of generation, and needs none
        left.pop("generation_config.json")
    assert left.keys() == files(alone).keys()
    assert left["model.safetensors"] == files(alone)["model.safetensors"]
    assert AutoTokenizer.from_pretrained(old).chat_template is None


def test_a_model_over_the_directory_that_it_was_loaded_from(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    word_tokenizer("{{ messages }}").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float64")
    save_pretrained_dir(model, AutoTokenizer.from_pretrained(tmp_path), tmp_path)
    assert checksum(model_shards(load_model(tmp_path, dtype="float64"))) == checksum(model_shards(model))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "{{ messages }}"


@pytest.mark.parametrize("adapter", [True, False])
def test_adapters_and_a_model_never_lie_in_one_directory(adapter: bool, tmp_path: Path) -> None:
    """Adapters over the model that they were merged into count twice, in whatever loads the directory."""
    model = adapted()
    save_pretrained_dir(model, None, tmp_path, adapter=not adapter)
    before = files(tmp_path)
    with pytest.raises(ModelError, match="name another directory"):
        save_pretrained_dir(model, None, tmp_path, adapter=adapter)
    assert files(tmp_path) == before
    save_pretrained_dir(model, None, tmp_path, adapter=not adapter)


def test_settings_of_generation_that_transformers_refuses_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(temperature=0.6)  # without do_sample
    with pytest.raises(ModelError, match=r"(?s)does not write LlamaForCausalLM .*do_sample"):
        save_pretrained_dir(model, None, tmp_path)
