"""The model check."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.models.check import check_model


def make_tokenizer(size: int = 61) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"</s>": 0, **{f"w{i}": i for i in range(1, size)}}, unk_token="w3"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


@pytest.mark.quick(every=3)
def test_a_sound_model(model: PreTrainedModel) -> None:
    report = check_model(model, make_tokenizer())
    assert not report.problems
    assert report.max_difference < 1e-9
    assert report.packed_forward == (model.config.model_type not in ("gemma2", "recurrent_gemma", "bloom"))
    assert report.tied_head == (model.lm_head.weight is model.get_input_embeddings().weight)
    assert report.eos_token_ids == [0, 2]
    assert json.loads(json.dumps(vars(report)))["parameters"] == sum(p.numel() for p in model.parameters())
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(report)
    assert "packed forward" in capture.get()
    assert report.device_map == {"cpu": report.parameters} and (report.strategy, report.sharding) == ("single", "none")
    shown = [line for line in capture.get().splitlines() if "difference" in line]
    assert [f"(at most {most:.0e})" in line for line, most in zip(shown, (1e-6, 1e-5), strict=True)] == [True, True]


def test_problems_are_told(llama: PreTrainedModel) -> None:
    tokenizer = make_tokenizer(70)
    tokenizer.eos_token = None
    llama.generation_config.eos_token_id = llama.config.eos_token_id = None
    report = check_model(llama, tokenizer)
    text = " ".join(report.problems)
    assert report.problems
    assert "70 tokens" in text
    assert "end-of-sequence" in text
