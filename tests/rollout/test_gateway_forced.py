"""Requests that force their reply: the grammar that holds it, and which tokens it leaves no choice for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.conftest import byte_tokenizer
from tests.rollout.agent_bodies import SCHEMA
from tests.templates import TOOL_FAMILIES
from verl.rollout.gateway.dialects.base import ChatRequest, RequestError
from verl.rollout.gateway.forced import constrains_reply, grammar_of, only_choices
from verl.rollout.gateway.messages import FAMILIES, ReplyParser
from verl.rollout.grammar import Grammar

pytest.importorskip("xgrammar")
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}} for name in ("add", "mul")
)
NAMED = {family.name: family for family in FAMILIES}
TOKENIZER = byte_tokenizer()
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 23}}\n</tool_call>',
    "llama 3": '{"name": "add", "parameters": {"a": 1, "b": 23}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 23}}]',
}


def tokens_of(text: str) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], 0]


def fits(grammar: Grammar | None, text: str) -> bool:
    """Whether a reply may be this, to its end."""
    assert grammar is not None
    mask, tokens = grammar.mask(TOKENIZER, len(TOKENIZER), [0]), tokens_of(text)
    return all(mask(tokens[:i], torch.zeros(len(TOKENIZER)))[tokens[i]] == 0 for i in range(len(tokens)))


def asked(**options: Any) -> ChatRequest:
    return ChatRequest("any", (), **{"tools": TOOLS, **options})


@pytest.mark.parametrize("family", CALLS)
def test_a_call_is_held_and_reads_back(family: str) -> None:
    text = CALLS[family]
    other = text.replace("add", "mul")
    required = grammar_of(asked(choice="required"), NAMED[family], "")
    assert fits(required, text) and fits(required, other) and not fits(required, text.replace("add", "sub"))
    assert not fits(required, "It is 4.") and not fits(required, text.replace('"a": 1, ', ""))
    named = grammar_of(asked(choice="mul"), NAMED[family], "")
    assert fits(named, other) and not fits(named, text)
    source = next(kind.template for kind in TOOL_FAMILIES.values() if kind.template and all(
        marker in kind.template for marker in NAMED[family].markers))  # fmt: skip
    (call,) = ReplyParser(object(), source)(text, "", TOOLS).calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 23})


def test_a_schema_is_held() -> None:
    alone = grammar_of(asked(schema=SCHEMA, tools=()), None, "")
    assert fits(alone, '{"a": 1, "b": 2}') and not fits(alone, '{"a": 1}') and not fits(alone, "four")
    either = grammar_of(asked(schema=SCHEMA), NAMED["hermes"], "")  # or a call, which the client left open
    assert fits(either, '{"a": 1, "b": 2}') and fits(either, CALLS["hermes"]) and not fits(either, "four")
    without = grammar_of(asked(schema=SCHEMA, choice="none"), NAMED["hermes"], "")
    assert not fits(without, CALLS["hermes"])


@pytest.mark.parametrize("family", CALLS)
def test_strict_tools_are_held_in_free_text(family: str) -> None:
    grammar = grammar_of(asked(strict=frozenset({"add"})), NAMED[family], "")
    text = CALLS[family]
    wrong = text.replace('"a": 1, ', "")
    assert fits(grammar, "It is 4.") and fits(grammar, text) and not fits(grammar, wrong)
    assert fits(grammar, wrong.replace("add", "mul"))  # which is not strict
    assert not fits(grammar, text.replace("add", "sub"))
    if family == "hermes":
        assert fits(grammar, f"Let me.\n{text}\n{text}") and not fits(grammar, f"Let me.\n{wrong}")
    assert not constrains_reply(asked(strict=frozenset({"add"}), choice="none"))


def test_nothing_is_held_that_nobody_asked_for() -> None:
    assert not constrains_reply(asked()) and not constrains_reply(asked(choice="none"))


@pytest.mark.parametrize(
    ("family", "options", "prompt", "what"),
    [
        ("qwen xml", {"choice": "required"}, "", "a call in the syntax of qwen xml"),
        ("deepseek", {"choice": "add"}, "", "a call in the syntax of deepseek"),
        ("gpt-oss", {"choice": "required"}, "", "a call in the syntax of gpt-oss"),
        ("", {"choice": "required"}, "", "a call in the syntax of this template"),
        ("hermes", {"choice": "required"}, "<|im_start|>assistant\n<think>\n", "a reply that begins with a thought"),
        ("hermes", {"schema": {"type": "nothing"}, "tools": ()}, "", "this schema"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(family: str, options: Any, prompt: str, what: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){what}.*cannot be held by a grammar") as caught:
        grammar_of(asked(**options), NAMED.get(family), prompt)
    assert caught.value.status == 400


def test_tokens_without_a_choice() -> None:
    grammar = grammar_of(asked(choice="required"), NAMED["hermes"], "")
    assert grammar is not None
    tokens = tokens_of(CALLS["hermes"])
    only = only_choices(grammar, TOKENIZER, [0], tokens)
    free = "".join(TOKENIZER.decode([token]) for token, forced in zip(tokens, only, strict=True) if not forced)
    # The first letter of the name; a sign or a digit of each number; and whether the number goes on.
    assert free == "a1,23}"
    assert only[-1]  # the end
