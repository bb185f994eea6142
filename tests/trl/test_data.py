"""TRL's tokens, order and batches of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import byte_tokenizer
from tests.data.test_templates import BROKEN, FAMILIES, says, user
from verl.errors import ConfigError, DataError
from verl.trl import DPOConfig, KTOConfig, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from verl.trl.data import LabelledLoader, ScoredLoader, TextLoader, TRLLoader

ROWS = [{"prompt": f"Say {i}: ", "completion": "a" * (1 + i)} for i in range(5)]
PAIRS = [{"prompt": f"Say {i}: ", "chosen": "good", "rejected": "bad" * i} for i in range(1, 4)]
CHAT = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}]


def texts(loader: TRLLoader) -> list[tuple[str, str]]:
    rows = zip(loader.batch["prompt_tokens"], loader.batch["response_tokens"], strict=True)
    return [tuple(map(byte_tokenizer().decode, row)) for row in rows]  # type: ignore[misc]


def test_a_batch_ends_with_the_epoch_and_no_row_is_left_out() -> None:
    loader = TRLLoader(ROWS, byte_tokenizer(), SFTConfig(seed=3), 2)
    sizes, seen = [], []
    for _ in range(6):
        state = loader.state_dict()
        batch = next(loader)
        sizes.append(len(batch))
        seen += batch["response"]
        loader.load_state_dict(state)
        assert next(loader)["id"] == batch["id"]
    assert sizes == [2, 2, 1] * 2 and sorted(seen[:5]) == sorted(seen[5:]) and seen[:5] != seen[5:]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("Say 0: ", "a<|end|>")),
        ({"completion_only_loss": False}, ("S", "ay 0: a<|end|>")),
        ({"truncation_mode": "keep_end", "max_length": 5}, ("0: ", "a<|end|>")),
        ({"truncation_mode": "keep_end", "max_length": 2}, ("a", "<|end|>")),
    ],
)
def test_which_tokens_are_trained(settings: dict[str, Any], expected: tuple[str, str]) -> None:
    args = SFTConfig(train_sampling_strategy="sequential", **settings)
    assert texts(TextLoader(ROWS[:1], byte_tokenizer(), args, 2)) == [expected]


def test_all_of_a_chat_is_trained_or_what_the_assistant_says() -> None:
    whole, said = (
        ("<|user|>", "hi<|end|>\n<|assistant|>yes<|end|>\n"),
        ("<|user|>hi<|end|>\n<|assistant|>", "yes<|end|>"),
    )
    assert texts(TextLoader(CHAT, byte_tokenizer(), SFTConfig(), 2)) == [whole]
    assert texts(TextLoader(CHAT, byte_tokenizer(), SFTConfig(assistant_only_loss=True), 2)) == [said]


def test_a_pair_with_a_long_response_is_left_out_of_reward_training() -> None:
    loader = ScoredLoader(PAIRS, byte_tokenizer(), RewardConfig(max_length=15), 2)
    assert len(loader) == 2 and loader.counts["dropped"] == 1
    assert texts(loader)[0][1] == "good", "an end that is the padding token, too, is not scored by transformers"
    with pytest.raises(DataError, match="max_length=9 tokens; none is left"):
        ScoredLoader(PAIRS, byte_tokenizer(), RewardConfig(max_length=9), 2)


def test_rows_of_kto_have_the_response_of_the_row_before_in_their_micro_batch() -> None:
    rows = [{**row, "label": True} for row in ROWS]
    loader = LabelledLoader(rows, byte_tokenizer(), KTOConfig(per_device_train_batch_size=2), 4)
    assert list(map(len, loader.batch["kl_response_tokens"])) == [3, 2, 5, 4, 6]
    pairs = LabelledLoader(PAIRS, byte_tokenizer(), KTOConfig(), 4)
    assert pairs.batch["label"] == [1.0] * 3 + [0.0] * 3 and len(pairs) == 6


@pytest.mark.parametrize("padding", [None, "<|user|>"])
def test_which_token_is_scored_is_saved(tiny: Path, tmp_path: Path, padding: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = padding or tokenizer.eos_token
    args = RewardConfig(str(tmp_path), max_steps=1, save_strategy="no")
    trainer = RewardTrainer(str(tiny), args, train_dataset=PAIRS, processing_class=tokenizer)
    trainer.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["score_at_eos"] is bool(padding)


def test_orders_that_are_not_here(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_sampling_strategy.*group_by_length"):
        SFTTrainer(str(tiny), SFTConfig(train_sampling_strategy="group_by_length"), train_dataset=ROWS)


@pytest.mark.parametrize("kind", BROKEN)
def test_replies_of_a_broken_template_are_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    reader = FAMILIES["chatml"].make()
    reader.chat_template, expected = BROKEN[kind]
    chat = [user("two?"), says("four is it and not five nor six, as all can see"), user("three?"), says("five")]
    rows = [{"messages": chat[:1] + chat[1:2]}, {"messages": chat}]
    try:
        TextLoader(rows, reader, SFTConfig(), 2)
        told = caplog.text
    except DataError as error:  # TRL's tokens cannot be made either
        told = str(error)
    assert re.search(expected, told, re.DOTALL)


def test_replies_that_generation_can_follow_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for rows in (CHAT, ROWS):
        TextLoader(rows, byte_tokenizer(), SFTConfig(), 2)
    TRLLoader(PAIRS, byte_tokenizer(), DPOConfig(), 2)
    assert not caplog.text
