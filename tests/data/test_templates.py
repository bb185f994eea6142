"""The laws of trained text, for each kind of template and each form of rows: the tokens are a beginning of what the
template writes, each turn stands behind its own prompt, and the last trained token stops generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest

from tests.templates import CHATML, FAMILIES, byte_level, spaced
from verl.batch import Batch
from verl.data.chat import ChatTokenizer
from verl.data.offline import OfflineDatasetLoader
from verl.data.prompts import load_prompts
from verl.data.tokenize import encode_prompts, to_prompts
from verl.errors import DataError


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be short."}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"of": [2, 2]}}}
PARTS = [{"type": "text", "text": "two plus two?"}]
ONE, TWO = [user("two plus two?"), says("four")], [user("two?"), says("four"), user(" three? "), says(" five")]
CALLING = [user("two plus two?"), says(None, tool_calls=[CALL]), {"role": "tool", "content": "4"}, says("four")]
THOUGHT = [user("two?"), says("<think>\nhm\n</think>\n\nfour")]
APART = [user("two?"), says("four", reasoning_content="hm")]
#: Form -> a row, and the chats that it is of.
FORMS: dict[str, tuple[dict[str, Any], list[list[dict[str, Any]]]]] = {
    "messages": ({"messages": ONE}, [ONE]),
    "a system's word": ({"messages": [SYSTEM, *ONE]}, [[SYSTEM, *ONE]]),
    "several turns": ({"messages": TWO}, [TWO]),
    "prompt and completion": ({"prompt": ONE[:1], "completion": ONE[1:]}, [ONE]),
    "a text as completion": ({"prompt": ONE[:1], "completion": "four"}, [ONE]),
    "spaces around": ({"prompt": ONE[:1], "completion": " \n four \n"}, [[ONE[0], says(" \n four \n")]]),
    "an end already there": ({"prompt": ONE[:1], "completion": "four{end}"}, [[ONE[0], says("four{end}")]]),
    "no ASCII": ({"messages": [user("zwei 二?"), says("vier 四 🙂")]}, [[user("zwei 二?"), says("vier 四 🙂")]]),
    "pairs": (
        {"prompt": TWO[:3], "chosen": TWO[3:], "rejected": [says("six")]},
        [TWO, [*TWO[:3], says("six")]],
    ),
    "implicit pairs": ({"chosen": ONE, "rejected": [ONE[0], says("six")]}, [ONE, [ONE[0], says("six")]]),
    "labels": ({"prompt": ONE[:1], "completion": ONE[1:], "label": True}, [ONE]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "two plus two?"}, {"from": "gpt", "value": "four"}]},
        [ONE],
    ),
    "alpaca": ({"instruction": "two plus two?", "output": "four", "history": []}, [ONE]),
    "parts": ({"messages": [user(PARTS), says([{"type": "text", "text": "four"}])]}, [ONE]),
    "tools": ({"messages": CALLING, "tools": TOOLS}, [CALLING]),
    "tools of a pair": (
        {"prompt": ONE[:1], "chosen": ONE[1:], "rejected": [says("six")], "tools": json.dumps(TOOLS)},
        [ONE, [ONE[0], says("six")]],
    ),
    "thoughts": ({"messages": THOUGHT}, [THOUGHT]),
    "thoughts apart": ({"messages": APART}, [APART]),
}
BEHIND, LEFT_OUT = "does not write this reply behind its prompt", "leaves out a part of the reply"
REWRITTEN = "writes earlier turns otherwise"
REFUSED: dict[tuple[str, str], str] = {
    **{("none", form): "no chat template" for form in FORMS},
    **{("r1", form): BEHIND for form in FORMS if form != "thoughts apart"},
    ("r1", "thoughts apart"): BEHIND,
    ("r1", "tools"): "cannot render",
    ("qwen3", "several turns"): REWRITTEN,
    ("qwq", "several turns"): REWRITTEN,
    ("r1 plain", "thoughts"): LEFT_OUT,
    ("gemma", "a system's word"): "there is no system",
    **{(family, "tools"): "does not write tool_calls"
       for family in ("chatml", "chatml of a base model", "gemma", "phi", "qwq")},
    **{(family, "tools"): "cannot render" for family in ("llama2", "r1 plain")},
    **{(family, "thoughts apart"): "does not write reasoning_content"
       for family in FAMILIES if family not in ("none", "qwen3", "qwq", "r1")},
}  # fmt: skip


@cache
def tokenizer(family: str) -> Any:
    return FAMILIES[family].make()


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def filled(value: Any, end: str) -> Any:
    if isinstance(value, str):
        return value.replace("{end}", end)
    if isinstance(value, Mapping):
        return {key: filled(item, end) for key, item in value.items()}
    return [filled(item, end) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_hold_or_the_row_is_refused(family: str, form: str) -> None:
    reader, last = tokenizer(family), FAMILIES[family].last
    row, chats = filled(FORMS[form][0], last), filled(FORMS[form][1], last)
    if (family, form) in REFUSED:
        with pytest.raises(DataError, match=f"row 0: .*{REFUSED[family, form]}"):
            OfflineDatasetLoader([row], reader)
        return
    batch = OfflineDatasetLoader([row], reader).batch
    assert len(batch) == len(chats)
    for columns, chat in zip(batch.rows(), chats, strict=True):
        check_laws(reader, columns, chat, {"tools": TOOLS} if "tools" in row else {}, last)


def check_laws(reader: Any, columns: Mapping[str, Any], chat: list[dict[str, Any]], inputs: Any, last: str) -> None:
    render: Callable[..., str] = partial(reader.apply_chat_template, tokenize=False, **inputs)
    tokens, mask = columns["response_tokens"], columns["response_mask"]
    whole = [*columns["prompt_tokens"], *tokens]
    assert render(chat).startswith(decode(reader, whole))
    turns = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
    starts = [at for at, bit in enumerate(mask) if bit and not (at and mask[at - 1])]
    trained = turns[-len(starts) :]
    ends = ChatTokenizer(reader).ends
    for start, turn in zip(starts, trained, strict=True):
        prompt = [*columns["prompt_tokens"], *tokens[:start]]
        assert decode(reader, prompt) == render(chat[:turn], add_generation_prompt=True)
        end = next((at for at in range(start, len(mask)) if not mask[at]), len(mask))
        if chat[turn].get("tool_calls"):
            assert tokens[end - 1] in reader.added_tokens_decoder
        else:
            assert tokens[end - 1] == reader.convert_tokens_to_ids(last) and tokens[end - 1] in ends
        assert not set(tokens[start : end - 1]) & {*ends}


PROMPTS: dict[str, dict[str, Any]] = {
    "a chat": {"prompt": ONE[:1]},
    "a system's word": {"messages": [SYSTEM, *ONE[:1]]},
    "several turns": {"messages": TWO[:3]},
    "a begun reply": {"prompt": [ONE[0], says("It is")]},
    "tools": {"prompt": CALLING[:3], "tools": TOOLS},
    "parts": {"prompt": [user([*PARTS, {"type": "text", "text": " now"}])]},
    "sharegpt": {"conversations": [{"from": "human", "value": "two?"}], "system": "Be short."},
}


UNWRITTEN = {
    *(("gemma", form) for form in ("a system's word", "sharegpt")),
    *((family, "tools") for family in ("llama2", "r1", "r1 plain")),
    *((family, "tools") for family in ("chatml", "chatml of a base model", "gemma", "phi", "qwq")),
}


@pytest.mark.parametrize("form", PROMPTS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "none"])
def test_a_prompt_is_what_the_template_writes(family: str, form: str) -> None:
    reader, data = tokenizer(family), load_prompts([PROMPTS[form]]).batch
    chat = json.loads(data["messages"][0])
    if form == "parts" and family != "gemma":
        chat[0]["content"] = "two plus two? now"
    begun = chat[-1]["role"] == "assistant"
    if (family, form) in UNWRITTEN:
        with pytest.raises(DataError, match=r"row 0: the chat template (cannot render|does not write tool_calls)"):
            encode_prompts(reader, data)
        return
    expected = reader.apply_chat_template(
        chat,
        tools=PROMPTS[form].get("tools"),
        tokenize=False,
        add_generation_prompt=not begun,
        continue_final_message=begun,
    )
    (tokens,) = encode_prompts(reader, data)
    assert decode(reader, tokens) == expected


READS_ALL = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    "{{ mood or '' }}" + CHATML + "{{ '!' if loud is defined and not loud else '' }}"
)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_template_reads_reaches_it_from_each_form_of_rows(as_json: bool) -> None:
    reader = FAMILIES["chatml"].make()
    reader.chat_template = READS_ALL
    more: dict[str, Any] = {
        "tools": TOOLS,
        "documents": [{"title": "a", "text": "sky"}],
        "chat_template_kwargs": {"mood": "glad", "loud": False},
    }
    columns = {name: json.dumps(value) if as_json else value for name, value in more.items()}
    inputs = {"tools": TOOLS, "documents": more["documents"], "mood": "glad", "loud": False}
    prompt = reader.apply_chat_template(ONE[:1], tokenize=False, add_generation_prompt=True, **inputs)
    assert prompt.startswith("(sum)[sky]glad") and prompt.endswith("!")
    rows: list[dict[str, Any]] = [
        {"prompt": ONE[:1]},
        {"messages": ONE[:1]},
        {"prompt": ONE[:1], "completion": "four"},
        {"prompt": ONE[:1], "chosen": ONE[1:], "rejected": [says("six")]},
        {"prompt": ONE[:1], "completion": ONE[1:], "label": 1},
        {"messages": ONE},
    ]
    for row in rows[:2]:
        assert decode(reader, to_prompts(reader, [{**row, **columns}])["prompt_tokens"][0]) == prompt
    for row in rows[2:]:
        # With the mark at the end the finished chat does not begin as its prompt does.
        with pytest.raises(DataError, match=BEHIND):
            OfflineDatasetLoader([{**row, **columns}], reader)
    reader.chat_template = READS_ALL.partition("{{ '!'")[0]
    for row in rows[2:]:
        batch = OfflineDatasetLoader([{**row, **columns}], reader).batch
        assert {decode(reader, tokens) + "!" for tokens in batch["prompt_tokens"]} == {prompt}
        (chat,) = batch["messages"][:1]
        check = reader.apply_chat_template([*json.loads(chat), says("four")], tokenize=False, **inputs)
        assert check.startswith(decode(reader, [*batch["prompt_tokens"][0], *batch["response_tokens"][0]]))
    several = OfflineDatasetLoader([{"messages": TWO, **columns}], reader).batch
    assert decode(reader, several["prompt_tokens"][0]).startswith("(sum)[sky]glad<|im_start|>user")


def test_columns_that_no_template_is_given() -> None:
    reader = FAMILIES["chatml"].make()
    # What the template cannot read may be anything, for rewards.
    rows = {"prompt": ONE[:1], "tools": ["sum"], "documents": ["sky"]}
    assert len(to_prompts(reader, [rows])["prompt_tokens"]) == 1
    reader.chat_template = READS_ALL
    with pytest.raises(DataError, match="row 0: column 'tools' is a list of JSON schemas"):
        to_prompts(reader, [rows])
    with pytest.raises(DataError, match="row 0: the chat template cannot render"):
        to_prompts(reader, [{**rows, "tools": None}])
    for wrong, told in (({"tokenize": True}, "sets tokenize"), ("loud", "is 'loud'"), ([1], r"is \[1\]")):
        with pytest.raises(DataError, match=f"row 1: column 'chat_template_kwargs' {told}"):
            to_prompts(reader, [{"prompt": ONE[:1]}, {"prompt": ONE[:1], "chat_template_kwargs": wrong}])
    with pytest.raises(DataError, match="column 'tools' has 'sum', which the episode has not"):
        to_prompts(reader, [{"prompt": ONE[:1], "tools": TOOLS}], [{"function": {"name": "add"}}])


BROKEN = {
    "drops replies": (CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else '' }}"), LEFT_OUT),
    "cuts replies": (CHATML.replace("{{ m.content }}", "{{ m.content[:20] }}"), LEFT_OUT),
    "drops all": ("{{ messages | length }}", "does not write what messages say"),
    "no end": (CHATML.replace("<|im_end|>", ""), r"ends a reply with .* where nothing stops generation"),
    "an end of letters": (CHATML.replace("<|im_end|>", "</end>"), "where nothing stops generation"),
    "another header": (CHATML.replace("|>assistant\n{% endif", "|>Assistant\n{% endif"), BEHIND),
    "opens a thought": (CHATML.replace("|>assistant\n{% endif", "|>assistant\n<think>{% endif"), BEHIND),
    "counts the messages": ("{{ messages | length }}" + CHATML, BEHIND),
    "changes at each rendering": ("{{ range(99999) | random }}" + CHATML, BEHIND),
    "raises": ("{{ raise_exception('no chat today') }}", "cannot render .* no chat today"),
    "is no template": ("{% for", "cannot render"),
    "drops earlier thoughts": (CHATML.replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content.split('four')[-1] }}"), REWRITTEN),
    "counts the turns": (CHATML.replace("<|im_end|>", "<|im_end|>{{ loop.length }}"), BEHIND),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_template_is_refused_by_name(kind: str) -> None:
    reader = FAMILIES["chatml"].make()
    reader.chat_template, told = BROKEN[kind]
    chat = [user("two?"), says("four is it and not five nor six, as all can see"), user("three?"), says("five")]
    with pytest.raises(DataError, match=f"(?s)row 1: .*{told}"):
        OfflineDatasetLoader([{"prompt": "two?", "completion": "x"}, {"messages": chat}], reader)


@pytest.mark.parametrize("role", ["system", "developer", "tool", "User"])
def test_a_message_that_the_template_leaves_out_is_refused(role: str) -> None:
    reader = FAMILIES["chatml"].make()
    known = "{% if m.role in ('user', 'assistant') %}<|im_start|>"
    reader.chat_template = CHATML.replace("<|im_start|>{{", known + "{{").replace(
        "|>\n{% endfor", "|>\n{% endif %}{% endfor"
    )
    chat = [user("two?"), {"role": role, "content": "Be short."}]
    for row in (
        {"prompt": chat},
        {"prompt": chat, "completion": "four"},
        {"prompt": chat, "chosen": "4", "rejected": "5"},
    ):
        with pytest.raises(
            DataError, match=f"row 0: the chat template does not write messages of the role {role} .'Be sh"
        ):
            OfflineDatasetLoader([row], reader) if len(row) > 1 else to_prompts(reader, [row])
    assert decode(reader, to_prompts(reader, [{"prompt": chat[:1]}])["prompt_tokens"][0]).count("two?") == 1


#: A template that joins the arguments to a text.
AS_TEXT = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}",
)
WRITTEN_CALLS = {"text": 'sum{"of": [2, 2]}'} | dict.fromkeys(("qwen3", "llama3"), '"arguments": {"of": [2, 2]}')


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("family", WRITTEN_CALLS)
def test_arguments_of_calls_are_written_once_whatever_their_form(family: str, as_json: bool) -> None:
    written = WRITTEN_CALLS[family]
    reader = FAMILIES["chatml" if family == "text" else family].make()
    if family == "text":
        reader.chat_template = AS_TEXT
    arguments = {"of": [2, 2]}
    function = {"name": "sum", "arguments": json.dumps(arguments) if as_json else arguments}
    chat = [*ONE[:1], says("", tool_calls=[{"type": "function", "function": function}]), CALLING[2], says("four")]
    assert written in decode(reader, to_prompts(reader, [{"prompt": chat[:3]}])["prompt_tokens"][0])
    assert written in decode(reader, OfflineDatasetLoader([{"messages": chat}], reader).batch["response_tokens"][0])


@pytest.mark.parametrize("key", ["weight", "train"])
def test_a_turn_without_weight_is_not_trained(key: str) -> None:
    reader, off = tokenizer("chatml"), {"weight": 0, "train": False}[key]
    chat = [user("two?"), {**says("three"), key: off}, user("no, two?"), {**says("four"), key: 1}]
    turns = [{"from": "gpt" if m["role"] == "assistant" else "human", "value": m["content"], **{
        name: m[name] for name in m if name == key}} for m in chat]  # fmt: skip
    for row in ({"messages": chat}, {"conversations": turns}):
        batch = OfflineDatasetLoader([row], reader).batch
        (tokens,), (mask,) = batch["response_tokens"], batch["response_mask"]
        assert decode(reader, [token for token, bit in zip(tokens, mask, strict=True) if bit]) == "four<|im_end|>"
        assert "three" in decode(reader, tokens)
    for wrong, told in ((off, "no turn of the assistant is trained"), (0.5, f"{key} of a message is 0 or 1")):
        with pytest.raises(DataError, match=f"row 0: {told}"):
            OfflineDatasetLoader([{"messages": [user("two?"), {**says("four"), key: wrong}]}], reader)


MAKERS = {
    "bytes": lambda **more: byte_level(["<s>", "</s>"], bos_token="<s>", eos_token="</s>", pad_token="</s>", **more),
    "spaces": lambda **more: spaced(["<s>", "</s>"], bos_token="<s>", eos_token="</s>", pad_token="</s>", **more),
}
TEXTS = [("two?", "four"), ("two?", " four"), ("two? ", "four"), ("A\n", "\nfour"), ("<s>[INST] two? [/INST]", " four"),
         ("Tw", "o")]  # fmt: skip


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("prompt", "reply"), TEXTS)
def test_texts_are_trained_as_they_stand(maker: str, begins: bool, prompt: str, reply: str) -> None:
    reader = MAKERS[maker](begin="<s>" if begins else None)
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "completion": reply},
        {"prompt": prompt, "completion": reply, "label": 1},
        {"prompt": prompt, "chosen": reply, "rejected": "six"},
        {"text": prompt + reply},
    ]
    text = prompt if prompt.startswith("<s>") else decode(reader, reader(prompt)["input_ids"])
    for row in rows:
        batch = OfflineDatasetLoader([row], reader).batch
        before, behind = batch["prompt_tokens"][0], batch["response_tokens"][0]
        assert decode(reader, [*before, *behind]) == f"{text}{reply}</s>" and behind[-1] == reader.eos_token_id
        if "text" not in row:
            assert decode(reader, before) == text
            assert before == encode_prompts(reader, Batch.from_columns({"prompt": [prompt]}))[0]
    done = OfflineDatasetLoader([{"prompt": prompt, "completion": f"{reply}</s>"}], reader).batch
    assert done["response_tokens"][0].count(reader.eos_token_id) == 1


def test_what_a_tokenizer_puts_around_texts() -> None:
    reader = MAKERS["bytes"](begin="<s>", end="</s>")
    assert decode(reader, reader("two")["input_ids"]) == "<s>two</s>"
    texts = ["two", "<s>two", "<s>"]
    assert [decode(reader, ids) for ids in encode_prompts(reader, Batch.from_columns({"prompt": texts}))] == [
        "<s>two", "<s>two", "<s>",
    ]  # fmt: skip
    (given,) = to_prompts(reader, [reader("two", add_special_tokens=False)["input_ids"]])["prompt"]
    assert given == "two"
    batch = OfflineDatasetLoader([{"text": "two"}, {"prompt": [5, 6], "completion": "two"}][:1], reader).batch
    assert decode(reader, batch["prompt_tokens"][0] + batch["response_tokens"][0]) == "<s>two</s>"
    reader.eos_token = None
    with pytest.raises(DataError, match=r"row 0: the tokenizer has no eos_token, so that nothing ends a response"):
        OfflineDatasetLoader([{"prompt": "two", "completion": "x"}], reader)


def test_prompts_that_are_tokens_stay_and_a_second_tokenizer_begins_anew() -> None:
    first, second = MAKERS["bytes"](), MAKERS["spaces"]()
    ids = second("two?", add_special_tokens=False)["input_ids"]
    rows = [{"prompt": prompt, "completion": " four"} for prompt in (ids, "two?")]
    loader = OfflineDatasetLoader(rows, first)
    loader.tokenize(second)
    assert loader.batch["prompt_tokens"] == [ids, ids]
    assert [decode(second, [*ids, *reply]) for reply in loader.batch["response_tokens"]] == ["two? four</s>"] * 2


def test_a_tokenizer_that_spells_no_text_as_it_was_is_read_as_it_writes() -> None:
    # As the older tokenizers of Llama 2: a space behind each special token, which no text has.
    reader = spaced(["<s>", "</s>"], scheme="always", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    reader.chat_template = FAMILIES["llama2"].template
    batch = OfflineDatasetLoader([{"messages": TWO}], reader).batch
    whole = reader(reader.apply_chat_template(TWO, tokenize=False), add_special_tokens=False)["input_ids"]
    assert [*batch["prompt_tokens"][0], *batch["response_tokens"][0]] == whole


def test_a_token_that_prompt_and_reply_would_share_is_divided() -> None:
    reader = FAMILIES["chatml"].make()
    assert len(reader("Two", add_special_tokens=False)["input_ids"]) == 1
    before = CHATML.replace("{{ m.content }}", "{{ 'Tw' if m.role == 'assistant' else '' }}{{ m.content }}")
    reader.chat_template = before.replace("assistant\n{% endif", "assistant\nTw{% endif")
    chat = [user("two?"), says("o")]
    batch = OfflineDatasetLoader([{"messages": chat}], reader).batch
    assert decode(reader, batch["response_tokens"][0]) == "o<|im_end|>"
    check_laws(reader, next(iter(batch.rows())), chat, {}, "<|im_end|>")


def test_rows_cut_by_length_are_counted_and_end_otherwise() -> None:
    reader = FAMILIES["chatml"].make()
    loader = OfflineDatasetLoader([{"messages": ONE}, {"messages": [ONE[0], says("")]}], reader, max_response_length=1)
    assert loader.counts["responses_truncated"] == 1
    assert [decode(reader, tokens[-1:]) == "<|im_end|>" for tokens in loader.batch["response_tokens"]] == [False, True]


def test_a_reply_that_holds_its_end_is_refused() -> None:
    for family in ("chatml", "phi", "llama2", "gemma"):
        reply = f"four{FAMILIES[family].last} and so on"
        with pytest.raises(DataError, match="row 0: the reply holds a token that stops generation"):
            OfflineDatasetLoader([{"messages": [ONE[0], says(reply)]}], tokenizer(family))
