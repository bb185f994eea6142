"""Reward models against a plain forward pass of one text at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import verl
from verl.batch import Batch
from verl.errors import ConfigError, ModelError
from verl.models.heads import ValueModel
from verl.rewards.make import make_reward
from verl.rewards.source import run_reward

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
SAMPLES = Batch.from_rows(
    [{"prompt": "p" * (i % 3 + 1), "response": "resp" * (i * i % 5) + "</s>" * (i % 2)} for i in range(11)]
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(["</s>", *letters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", chat_template=CHAT)


def config_of(kind: str) -> Any:
    sizes = {"vocab_size": 257, "num_labels": 1}
    wide = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "llama": lambda: LlamaConfig(**sizes, **wide, max_position_embeddings=64),
        "gpt2": lambda: GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=2, n_positions=64),
        "bert": lambda: BertConfig(**sizes, **wide, max_position_embeddings=64),
    }[kind]()


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of(kind), dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def one_by_one(model: Any, texts: list[str], tokenizer: Any) -> list[float]:
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        return [float(model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, 0]) for row in ids]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_scores_are_those_of_each_text_alone(kind: str, batch_size: int) -> None:
    model, tokenizer = make_model(kind), make_tokenizer()
    texts = [p + r for p, r in zip(SAMPLES["prompt"], SAMPLES["response"], strict=True)]
    result = run_reward(make_reward(model, tokenizer=tokenizer, batch_size=batch_size), SAMPLES)
    assert result.reward == pytest.approx(one_by_one(model, texts, tokenizer), abs=1e-6)
    assert len({round(reward or 0.0, 6) for reward in result.reward}) > 5


def test_from_a_directory_through_its_own_template(tmp_path: Path) -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    batch = Batch.from_rows([{"messages": json.dumps(chat), "response": "there"}])
    source = make_reward(str(tmp_path))
    assert run_reward(source, batch).reward == pytest.approx(
        one_by_one(model, ["[user]hi</s>[assistant]there</s>"], tokenizer), abs=1e-5
    )


def test_long_texts_lose_their_beginning() -> None:
    model, tokenizer = make_model("gpt2"), make_tokenizer()
    batch = Batch.from_rows([{"prompt": "x" * 500, "response": "y" * 30}])
    expected = one_by_one(model, ["x" * 34 + "y" * 30], tokenizer)
    assert run_reward(make_reward(model, tokenizer=tokenizer), batch).reward == pytest.approx(expected, abs=1e-9)


def test_a_value_model_scores_its_last_token() -> None:
    tokenizer = make_tokenizer()
    classifier = make_model("llama")
    model = ValueModel.from_model(classifier).eval()
    texts = [p + r for p, r in zip(SAMPLES["prompt"], SAMPLES["response"], strict=True)]
    result = run_reward(make_reward(model, tokenizer=tokenizer), SAMPLES)
    assert result.reward == pytest.approx(one_by_one(classifier, texts, tokenizer), abs=1e-6)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"missing.*score\.weight.*no reward model"):
        verl.Reward(str(tmp_path))
    with pytest.raises(ModelError, match="not loaded from a name or path"):
        verl.Reward(make_model("llama"))
    config.num_labels = 3
    with pytest.raises(ModelError, match="one label, this one has 3"):
        verl.Reward(AutoModelForSequenceClassification.from_config(config), tokenizer=make_tokenizer())


def test_a_model_is_read_when_it_is_made_or_later(tmp_path: Path) -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    scores = verl.Reward(model=model, tokenizer=tokenizer).get_reward(SAMPLES)["reward"]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    later = [verl.Reward(model=str(tmp_path), load=load) for load in (False, True)]
    scorer = [reward.source.function for reward in later]  # type: ignore[attr-defined]
    assert scorer[0].model is None and scorer[1].model is not None
    assert [reward.get_reward(SAMPLES)["reward"] for reward in later] == [scores, scores]
    assert scorer[0].model is not None
    with pytest.raises(ModelError):
        verl.Reward(model=str(tmp_path / "missing"), load=False).load()


def test_a_tokenizer_that_fails_abstains() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    batch = Batch.from_rows([{"messages": json.dumps([{"role": "user", "content": "x"}]), "response": "y"}])
    result = run_reward(make_reward(make_model("llama"), tokenizer=tokenizer), batch)
    assert result.reward == [None]
    assert "no chat template" in str(result.reasons[0])


def test_a_model_that_the_map_places_has_the_same_scores(tmp_path: Path) -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    here = verl.Reward(model=model, tokenizer=tokenizer).get_reward(SAMPLES)
    placed = verl.Reward(
        model=model, tokenizer=tokenizer, placement={"actor": "cpu:0", "reward": {"cpu_ids": [0], "parallel": "data"}}
    )
    model.requires_grad_(True)
    assert placed.get_reward(SAMPLES)["reward"] == here["reward"]
    assert not any(weight.requires_grad for weight in model.parameters())  # its worker has made it its own


def test_slots_for_a_reward_without_a_model_or_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="no reward model of this process"):
        verl.Reward(len, placement={"reward": "cpu:0"})
    with pytest.raises(ConfigError, match="whole on each of its devices"):
        verl.Reward(
            model=make_model("gpt2"),
            tokenizer=make_tokenizer(),
            placement={"reward": {"cpu_ids": [0], "parallel": "tensor"}},
        )
