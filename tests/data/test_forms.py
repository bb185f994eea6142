"""Rows of ShareGPT, Alpaca and plain texts; chats of several turns, and with tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.batch import Batch
from verl.data.loader import PromptLoader
from verl.data.offline import OfflineDatasetLoader
from verl.data.prompts import load_prompts
from verl.data.task_loader import MixedLoader
from verl.errors import DataError
from verl.models.loading import load_tokenizer

TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another?"},
    {"role": "assistant", "content": "Red."},
]
SAID = [("system", "Be short."), ("human", "Name a colour."), ("gpt", "Blue."), ("human", "Another?"), ("gpt", "Red.")]
SHAREGPT = {"conversations": [{"from": who, "value": text} for who, text in SAID]}
ALPACA = {"instruction": "Another?", "input": "", "output": "Red.", "system": "Be short.",
          "history": [["Name a colour.", "Blue."]]}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(tiny)


def trained(batch: Batch, tokenizer: Any, row: int = 0) -> list[str]:
    """The texts that are trained in a row."""
    tokens, mask = batch["response_tokens"][row], batch["response_mask"][row]
    text = "".join(tokenizer.decode([t]) if m else "§" for t, m in zip(tokens, mask, strict=True))
    return [part for part in text.split("§") if part]


def whole(batch: Batch, tokenizer: Any, row: int = 0) -> str:
    return str(tokenizer.decode(batch["prompt_tokens"][row] + batch["response_tokens"][row]))


@pytest.mark.parametrize("row", [{"messages": TURNS}, SHAREGPT])
def test_every_turn_of_the_assistant_is_trained(tokenizer: Any, row: dict[str, Any]) -> None:
    batch = OfflineDatasetLoader([row], tokenizer).batch
    assert trained(batch, tokenizer) == ["Blue.<|end|>", "Red.<|end|>"]
    assert whole(batch, tokenizer) + "\n" == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(batch["prompt_tokens"][0]).endswith("Name a colour.<|end|>\n<|assistant|>")


def test_alpaca_is_an_answer_to_a_chat(tokenizer: Any) -> None:
    batch = OfflineDatasetLoader([ALPACA, {"instruction": "Add.", "input": "1 2", "output": "3"}], tokenizer).batch
    assert trained(batch, tokenizer) == ["Red.<|end|>"] and trained(batch, tokenizer, 1) == ["3<|end|>"]
    assert whole(batch, tokenizer) + "\n" == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert json.loads(batch["messages"][1]) == [{"role": "user", "content": "Add.\n1 2"}]


def test_all_of_a_text_is_trained(tokenizer: Any) -> None:
    loader = OfflineDatasetLoader([{"text": "Once upon", "source": 1}], tokenizer, max_length=6)
    assert loader.batch["prompt_tokens"] == [tokenizer("O")["input_ids"]]
    assert tokenizer.decode(loader.batch["response_tokens"][0]) == "nce u"
    assert loader.counts["responses_truncated"] == 1 and loader.batch["response_mask"] == [[1] * 5]
    longer = OfflineDatasetLoader([{"text": "Once"}], tokenizer).batch
    assert trained(longer, tokenizer) == ["nce<|end|>"]
    with pytest.raises(DataError, match="row 0: a text is empty"):
        OfflineDatasetLoader([{"text": ""}], tokenizer)


def test_tools_are_shown_and_their_results_not_trained(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "sum"}}]
    call = {"from": "function_call", "value": json.dumps({"name": "sum", "arguments": {}})}
    said = [
        {"from": "human", "value": "1+1"},
        call,
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2!"},
    ]
    batch = OfflineDatasetLoader([{"conversations": said, "tools": json.dumps(tools)}], tokenizer).batch
    assert trained(batch, tokenizer) == ["[sum]<|end|>", "2!<|end|>"]
    expected = "(sum)<|user|>1+1<|end|><|assistant|>[sum]<|end|><|tool|>2<|end|><|assistant|>2!<|end|>"
    assert whole(batch, tokenizer) == expected
    with pytest.raises(DataError, match="row 0: column 'tools' is no JSON"):
        OfflineDatasetLoader([{"conversations": said, "tools": "sum"}], tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last or m.role != 'assistant' %}{{ m.content }}"
        "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(DataError, match="row 0: the chat template writes earlier turns otherwise"):
        OfflineDatasetLoader([{"messages": TURNS}], tokenizer)


def test_bad_turns_are_named() -> None:
    with pytest.raises(DataError, match=r"row 0: a turn of 'conversations' has from \(human"):
        OfflineDatasetLoader([{"conversations": [{"from": "me", "value": "x"}]}])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "a turn of 'conversations' has from"),
        ({"conversations": [{"from": "human", "value": ["x"]}]}, "a turn of 'conversations' has from"),
        ({"conversations": "human: x"}, "'conversations' is a list of turns"),
        ({"conversations": {"from": "human", "value": "x"}}, "'conversations' is a list of turns"),
        ({"conversations": []}, "'conversations' is a list of turns"),
        ({**SHAREGPT, "system": ["x"]}, "'system' is a text"),
        ({**ALPACA, "history": [["asked"]]}, "'history' a list of pairs"),
        ({**ALPACA, "history": ["asked", "said"]}, "'history' a list of pairs"),
        ({**ALPACA, "history": [["asked", 3]]}, "'history' a list of pairs"),
        ({**ALPACA, "history": "asked"}, "'history' a list of pairs"),
        ({**ALPACA, "input": ["x"]}, "'instruction' and 'input' are texts"),
    ],
)
def test_rows_of_almost_such_a_form_are_refused_by_name(row: dict[str, Any], told: str) -> None:
    for read in (load_prompts, OfflineDatasetLoader):
        with pytest.raises(DataError, match=f"row 0.*{told}"):
            read([row])


def test_sharegpt_is_a_prompt_too() -> None:
    (messages,) = load_prompts([{"conversations": SHAREGPT["conversations"][:2]}]).batch["messages"]
    assert json.loads(messages) == TURNS[:2]


def test_data_sets_are_mixed_by_their_weights(make_rows: Callable[[str, int], list[dict[str, str]]]) -> None:
    data = {"a": make_rows("a", 5), "b": make_rows("b", 50)}

    def share(shares: dict[str, float] | None) -> float:
        loader = MixedLoader(data, shares, batch_size=10)
        names = [prompt[0] for _ in range(20) for prompt in next(loader)["prompt"]]
        assert len(names) == 200
        return names.count("a") / 200

    assert share({"a": 0.7, "b": 0.3}) == pytest.approx(0.7, abs=0.01)
    assert share(None) == pytest.approx(5 / 55, abs=0.01)
    first, second = (MixedLoader(data, {"a": 1, "b": 2}, batch_size=4) for _ in range(2))
    next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert next(first)["id"] == next(second)["id"]
    assert len(PromptLoader(load_prompts(data["a"]), 2).data) == 5


@pytest.fixture
def make_rows() -> Callable[[str, int], list[dict[str, str]]]:
    return lambda name, count: [{"prompt": f"{name}{number}"} for number in range(count)]
