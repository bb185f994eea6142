from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from verl.batch import Batch
from verl.data.prompts import load_prompts, stream_prompts
from verl.data.tokenize import PromptTokenizer, encode_prompts, to_prompts, tokenize_prompts
from verl.errors import ConfigError, DataError


def test_each_kind_is_encoded_in_its_own_way(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hé"}]
    data = load_prompts(["plain <|end|> text", chat, [7, 8]])
    plain, rendered, ids = encode_prompts(tokenizer, data.batch)
    assert plain == tokenizer("plain <|end|> text")["input_ids"]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert rendered == list(whole["input_ids"])
    assert tokenizer.decode(rendered) == "<|user|>hé<|end|>\n<|assistant|>"
    assert ids == [7, 8]


@pytest.mark.parametrize("begins", [False, True])
def test_token_ids_have_a_text_and_stay_as_they_are(tokenizer: Any, begins: bool) -> None:
    if begins:
        start = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", 3)])
        tokenizer.backend_tokenizer.post_processor = start
    chat = [{"role": "user", "content": "x"}]
    plain, odd = list(tokenizer("ab")["input_ids"]), [1, *tokenizer("b", add_special_tokens=False)["input_ids"], 0]
    done = to_prompts(tokenizer, load_prompts([plain, "ab", chat, odd]).batch)
    assert done["prompt"] == ["ab", "ab", None, "<|user|>b<|end|>"]
    assert [done["prompt_tokens"][row] for row in (0, 1, 3)] == [plain, plain, odd]
    assert to_prompts(tokenizer, done) == done
    assert to_prompts(tokenizer, load_prompts([plain]).batch)["prompt"] == ["ab"]


def test_a_begun_reply_goes_on(tokenizer: Any) -> None:
    data = load_prompts([[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}]])
    assert tokenizer.decode(encode_prompts(tokenizer, data.batch)[0]) == "<|user|>2+2?<|end|>\n<|assistant|>It is"


@pytest.mark.parametrize(
    ("truncation", "texts", "counts"),
    [
        ("left", ["ab", "efgh"], {"rows": 2, "truncated": 1, "dropped": 0, "longest": 8}),
        ("right", ["ab", "abcd"], {"rows": 2, "truncated": 1, "dropped": 0, "longest": 8}),
        ("drop", ["ab"], {"rows": 2, "truncated": 0, "dropped": 1, "longest": 8}),
    ],
)
def test_long_prompts(tokenizer: Any, truncation: Any, texts: list[str], counts: dict[str, int]) -> None:
    data, found = tokenize_prompts(
        load_prompts(["ab", "abcdefgh"]), tokenizer, max_prompt_length=4, truncation=truncation
    )
    assert [tokenizer.decode(ids) for ids in data.batch["prompt_tokens"]] == texts
    assert found == counts


def test_long_prompts_can_be_refused(tokenizer: Any) -> None:
    data = load_prompts(["ab", "abcdefgh"])
    with pytest.raises(DataError, match=r"1 of 2 prompts are longer than 4 tokens, the first in row 1 with 8"):
        tokenize_prompts(data, tokenizer, max_prompt_length=4)
    with pytest.raises(DataError, match="none is left"):
        tokenize_prompts(data, tokenizer, max_prompt_length=1, truncation="drop")
    with pytest.raises(ConfigError, match="left, right, drop, error"):
        PromptTokenizer(tokenizer, truncation="middle")  # type: ignore[arg-type]


def test_empty_prompts_are_refused_by_row(tokenizer: Any) -> None:
    batch = Batch.from_columns({"prompt": ["a", ""]})
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        PromptTokenizer(tokenizer)(batch)


def test_chats_need_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    data = load_prompts([[{"role": "user", "content": "x"}]])
    with pytest.raises(DataError, match="no chat template"):
        tokenize_prompts(data, tokenizer)


def test_streams_are_tokenised_as_they_are_read(tokenizer: Any) -> None:
    stream, counts = tokenize_prompts(
        stream_prompts(text for text in ["ab", "abcdefgh", "c"]), tokenizer, max_prompt_length=4, truncation="drop"
    )
    assert [(number, tokenizer.decode(row["prompt_tokens"])) for number, row, _ in stream.rows(0)] == [
        (0, "ab"),
        (2, "c"),
    ]
    assert counts["dropped"] == 1
