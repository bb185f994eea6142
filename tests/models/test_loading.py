"""Reading models and tokenizers: what is accepted, and every refusal in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import verl
from verl.attention.segments import pack_rows
from verl.errors import ModelError
from verl.models import loading
from verl.models.heads import ValueModel
from verl.models.loading import (
    eos_token_ids,
    find_tokenizer,
    load_model,
    load_tokenizer,
    resolved_dtype,
    slow_in_half_precision,
)
from verl.models.packed import PackedModel
from verl.models.save import save_pretrained_dir


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 61)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def saved(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_pretrained_dir(llama.float(), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def last_values(model: ValueModel, ids: list[int]) -> torch.Tensor:
    flat = pack_rows([ids], [[]])
    return model.score(PackedModel(model.backbone).hidden(flat.tokens, flat.positions, flat.context))


def test_a_saved_directory_comes_back(saved: Path, llama: PreTrainedModel) -> None:
    model = load_model(saved)
    assert not model.training
    assert model.dtype == torch.float32
    assert load_model(saved, dtype="bfloat16").dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, llama.state_dict()[name])
    assert load_tokenizer(saved).pad_token == "</s>"
    assert find_tokenizer(model).get_vocab() == load_tokenizer(saved).get_vocab()


@pytest.mark.parametrize("slow", [True, False])
def test_auto_is_fp32_where_half_precision_is_slow(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    load_model(saved, dtype="bfloat16").save_pretrained(tmp_path / "half")
    load_model(saved, dtype="float64").save_pretrained(tmp_path / "double")
    monkeypatch.setattr(loading, "slow_in_half_precision", lambda: slow)
    expected = "float32" if slow else "bfloat16"
    for name, dtype in (("half", expected), ("double", "float64")):
        for kind in ("causal", "value"):
            assert next(load_model(tmp_path / name, kind=kind).parameters()).dtype == getattr(torch, dtype)
        assert resolved_dtype(tmp_path / name, "auto") == dtype
    assert load_model(tmp_path / "half", dtype="bfloat16").dtype == torch.bfloat16
    assert resolved_dtype(tmp_path / "half", "float16") == "float16"


def test_half_precision_is_slow_without_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for avx512, amx in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=avx512: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=amx: has)
        slow_in_half_precision.cache_clear()
        with caplog.at_level("INFO", "verl.models.loading"):
            assert [slow_in_half_precision() for _ in range(3)] == [not (avx512 or amx)] * 3
    assert caplog.text.count("float32 here") == 1  # it is logged once
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    slow_in_half_precision.cache_clear()
    assert not slow_in_half_precision()
    slow_in_half_precision.cache_clear()


def test_eos_comes_from_model_and_tokenizer(saved: Path) -> None:
    model, tokenizer = load_model(saved), load_tokenizer(saved)
    model.generation_config.eos_token_id = [7, 2, 128009]
    assert eos_token_ids(model, tokenizer) == (2, 7)
    tokenizer.eos_token = "w5"
    assert eos_token_ids(model, tokenizer) == (2, 5, 7)


@pytest.mark.parametrize("name", ["", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_no_such_directory(name: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_model(name)


def test_hub_name_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="switched off by HF_HUB_OFFLINE"):
        load_model("no-such-organisation/no-such-model")


def test_broken_directories(saved: Path) -> None:
    weights = saved / "model.safetensors"
    with pytest.raises(ModelError, match="is a file"):
        load_model(weights)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(saved)
    weights.unlink()
    with pytest.raises(ModelError, match="no weights"):
        load_model(saved)
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights"):
        load_model(saved)
    (saved / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(saved)


def test_unknown_architecture_and_dtype(saved: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'bfloat16'"):
        load_model(saved, dtype="bfloat")
    (saved / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="no-such-model"):
        load_model(saved)


def test_no_tokenizer(saved: Path, llama: PreTrainedModel) -> None:
    for file in saved.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(saved)
    with pytest.raises(ModelError, match="pass tokenizer="):
        find_tokenizer(load_model(saved))
    with pytest.raises(ModelError, match="was not loaded from a name"):
        find_tokenizer(llama)


def test_a_new_value_head_predicts_zero_in_fp32(saved: Path) -> None:
    critic = load_model(saved, dtype="bfloat16", kind="value")
    assert critic.new_head
    values = last_values(critic, [5, 6, 7])
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 0.0, 0.0]


def test_a_saved_critic_is_a_token_classifier(saved: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    critic = load_model(saved, kind="value")
    with torch.no_grad():
        critic.score.weight.normal_()
        critic.score.bias.fill_(0.5)
    expected = last_values(critic, [5, 6, 7])
    save_pretrained_dir(critic, tokenizer, tmp_path / "critic")
    again = load_model(tmp_path / "critic", kind="value")
    assert not again.new_head
    assert torch.equal(last_values(again, [5, 6, 7]), expected)
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    assert torch.allclose(theirs(torch.tensor([[5, 6, 7]])).logits[0, :, 0], expected, atol=1e-5)


def test_a_reward_model_keeps_its_head(saved: Path, tmp_path: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1).eval()
    theirs.config.pad_token_id = 0
    expected = theirs(torch.tensor([[5, 6, 7]])).logits[0, 0]
    theirs.save_pretrained(tmp_path / "reward", max_shard_size="20KB")
    assert (tmp_path / "reward" / "model.safetensors.index.json").is_file()
    for ours in (load_model(tmp_path / "reward", kind="score"), ValueModel.from_model(theirs)):
        assert not ours.new_head
        assert torch.allclose(last_values(ours, [5, 6, 7])[-1], expected, atol=1e-5)


def test_a_classifier_with_several_labels_is_no_reward_model(saved: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ModelError, match="several labels"):
        load_model(tmp_path / "classifier", kind="score")
    with pytest.raises(ModelError, match="a classifier with several labels, which is no reward model") as caught:
        verl.Reward(model=str(tmp_path / "classifier")).get_reward(["a"])
    assert "cut short" not in str(caught.value)
