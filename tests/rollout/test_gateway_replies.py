"""What a policy wrote, as messages: rendered conversations with calls parse back to what was written, on the shapes of
known families, or their template is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.templates import FAMILIES, TOOL_FAMILIES
from verl.errors import ConfigError
from verl.rollout.gateway.messages import Message, ReplyParser, ToolCall
from verl.rollout.gateway.template import ChatTemplate

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}
ARGUMENTS = {"city": 'Köln "am" Rhein,\nGermany {1}', "days": 3, "where": {"x": [1, 2.5, None, True]}}
CALL = ToolCall("weather", json.dumps(ARGUMENTS, ensure_ascii=False), "call00000")


def templates() -> dict[str, Any]:
    ours = {f"{name}, hermes": (kind.make(), "hermes") for name, kind in FAMILIES.items() if name in ("chatml", "phi")}
    return {name: (kind.make(), None) for name, kind in TOOL_FAMILIES.items()} | ours


@pytest.mark.parametrize("family", [*TOOL_FAMILIES, "chatml, hermes", "phi, hermes"])
@pytest.mark.parametrize("said", [Message("assistant", "It rains."), Message("assistant", "", (CALL,))])
def test_a_rendered_conversation_parses_back(family: str, said: Message) -> None:
    tokenizer, ours = templates()[family]
    template = ChatTemplate(tokenizer, ours)
    assert template.check() == []
    chat = [Message("user", "And the weather?")]
    first = template.write(chat, [WEATHER], reply=True)
    text = template.write([*chat, said], [WEATHER], reply=False)
    behind = template.behind(text, first, said, True, [])
    assert behind
    tokens = template.chat.encode(text[len(first) :].removesuffix(behind))
    parsed = template.parse(template.text(tokens), first, [WEATHER])
    assert parsed.key == said.key


WRITTEN = {
    "hermes": 'Two.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n'
    '<tool_call>{"name":"g"}</tool_call>',
    "qwen xml": "Two.\n<tool_call>\n<function=f>\n<parameter=a>\n</x>\n</parameter>\n</function>\n</tool_call>"
    "<tool_call><function=g>\n</function></tool_call>",
    "mistral": 'Two.[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
    "mistral 11": 'Two.[TOOL_CALLS]f[CALL_ID]123[ARGS]{"a": "]"}[TOOL_CALLS]g[ARGS]{}',
    "deepseek": 'Two.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_text_and_several_calls(family: str) -> None:
    source = TOOL_FAMILIES.get(family, TOOL_FAMILIES["qwen2.5"]).template
    message = ReplyParser(SimpleNamespace(), str(source))(WRITTEN[family], "", [WEATHER])
    assert message.content == "Two."
    assert [(call.name, len(json.loads(call.arguments))) for call in message.calls] == [("f", 1), ("g", 0)]


def test_thoughts_and_calls_of_harmony() -> None:
    parse = ReplyParser(SimpleNamespace(), str(TOOL_FAMILIES["gpt-oss"].template))
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"days": 3}<|call|>'
    )
    message = parse(text, "", [WEATHER])
    assert message == Message("assistant", "", (ToolCall("weather", '{"days": 3}'),), "Hm.")
    assert parse(text).content == text  # there are no tools
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It rains."
    assert parse(final) == Message("assistant", "It rains.", (), "Hm.")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {\n',
        "<tool_call>\n{'name': 'f'}\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f"}',
        '<tool_call>{"name": "f"}</tool_call> and <tool_call>',
        "<tool_call>" + "[" * 100_000,
        "It rains.",
    ],
)
def test_what_does_not_parse_is_text(text: str) -> None:
    message = ReplyParser(SimpleNamespace(), str(TOOL_FAMILIES["qwen2.5"].template))(text, "", [WEATHER])
    assert message == Message("assistant", text)


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parse = ReplyParser(SimpleNamespace(), str(TOOL_FAMILIES["qwen2.5"].template))
    assert parse(text).calls == () and len(parse(text, "", [WEATHER]).calls) == 1


def test_thoughts_are_divided_from_what_is_said() -> None:
    parse = ReplyParser(SimpleNamespace(), str(FAMILIES["qwen3"].template))
    assert parse("<think>\nHm.\n</think>\n\nYes.") == Message("assistant", "Yes.", (), "Hm.")
    assert parse("Hm.\n</think>\n\nYes.", "<|im_start|>assistant\n<think>\n") == Message("assistant", "Yes.", (), "Hm.")
    assert parse("<think>\nHm.") == Message("assistant", "", (), "Hm.")
    assert parse("I <think> so </think>.") == Message("assistant", "I <think> so </think>.")
    # A template that knows no thoughts shows them as the text that they are.
    plain = ReplyParser(SimpleNamespace(), str(FAMILIES["chatml"].template))
    assert plain("<think>Hm.</think>Yes.") == Message("assistant", "<think>Hm.</think>Yes.")


def test_the_tokenizers_own_template_of_responses_comes_first() -> None:
    def parse_response(text: str, prefix: str, tools: Any) -> dict[str, Any]:
        if "broken" in text:
            raise ValueError("broken")
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        return {"role": "assistant", "content": "Yes.", "thinking": "Hm.", "tool_calls": [call]}

    tokenizer = SimpleNamespace(response_template={}, parse_response=parse_response)
    parse = ReplyParser(tokenizer, str(TOOL_FAMILIES["qwen2.5"].template))
    assert parse("any", "", [WEATHER]) == Message("assistant", "Yes.", (ToolCall("f", '{"a": 1}'),), "Hm.")
    assert parse("broken") == Message("assistant", "broken")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("chatml", "does not show the tools of a request"),
        ("r1", "does not show the tools of a request"),
        ("llama2", "roles are system, user and assistant"),
        ("gemma", "does not show the tools"),
    ],
)
def test_a_template_that_does_not_show_tools_is_refused(family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*chat_template='hermes'"):
        ChatTemplate(FAMILIES[family].make()).check()


def test_each_part_that_a_template_leaves_out_is_named() -> None:
    tokenizer = TOOL_FAMILIES["qwen2.5"].make()
    whole = tokenizer.chat_template
    for part, without, what in (
        ("{{ c.function | tojson }}", "{}", "the name of a call"),
        ("{{ c.function | tojson }}", '{"name": "{{ c.function.name }}"}', "the arguments of a call"),
        ("<tool_response>\n{{ m.content }}", "<tool_response>\n", "the result of a call"),
        ("<tool_call>", "<call>", "no known syntax"),
    ):
        assert part in whole
        tokenizer.chat_template = whole.replace(part, without)
        with pytest.raises(ConfigError, match=what):
            ChatTemplate(tokenizer).check()


def test_a_template_that_drops_thoughts_is_reported() -> None:
    tokenizer = TOOL_FAMILIES["qwen3"].make()
    assert ChatTemplate(tokenizer).check() == []
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ thought.strip() }}", "")
    assert ChatTemplate(tokenizer).check() == ["thoughts"]


def test_a_template_by_name_or_file(tmp_path: Path) -> None:
    tokenizer = FAMILIES["chatml"].make()
    source = tokenizer.chat_template
    ChatTemplate(tokenizer, "hermes").check()
    assert tokenizer.chat_template == source  # the tokenizer itself is left as it is
    (tmp_path / "mine.jinja").write_text(str(TOOL_FAMILIES["qwen2.5"].template))
    ChatTemplate(tokenizer, str(tmp_path / "mine.jinja")).check()
    with pytest.raises(ConfigError, match=r"'hermse' is neither one of ours \(hermes\) nor a file"):
        ChatTemplate(tokenizer, "hermse")
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(FAMILIES["none"].make())


@pytest.mark.slow
def test_smollm2_needs_hermes(smol: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smol)
    with pytest.raises(ConfigError, match="chat_template='hermes'"):
        ChatTemplate(tokenizer).check()
    template = ChatTemplate(tokenizer, "hermes")
    assert template.check() == []
    text = template.write([Message("user", "Hello.")], [WEATHER], reply=True)
    assert text.startswith('<|im_start|>system\nYou may call these functions:\n<tools>\n{"type": "function"')
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n")
