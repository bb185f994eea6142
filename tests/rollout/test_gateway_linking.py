"""Calls of an agent become trajectories: those that a slow plain reference says, on templates of several families."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.rollout.plain_linking import PlainEpisode
from tests.templates import FAMILIES
from verl.data.text import spelled
from verl.rollout.base import Sample
from verl.rollout.gateway.dialects.base import ChatAnswer, Reply
from verl.rollout.gateway.dialects.chat import CHAT
from verl.rollout.gateway.linking import Call, Conversations, trajectories
from verl.rollout.gateway.template import OURS, ChatTemplate

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
SYSTEM = {"role": "system", "content": "Help."}
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"b":  2, "a": 2}}\n</tool_call>'
CALLS = {
    "hermes": HERMES_CALL,
    "qwen2.5": HERMES_CALL,
    "qwen3": HERMES_CALL,
    "llama3": '{"name": "add", "parameters": {"b":  2, "a": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"b":  2, "a": 2}}]',
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str, call_id: str = "another") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


class Spy:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class Both:
    """An episode for the gateway's linking and for the plain one."""

    def __init__(self, family: str) -> None:
        kind = FAMILIES["chatml" if family == "hermes" else family]
        self.tokenizer, self.last, self.family = kind.make(), kind.last, family
        if family == "hermes":
            self.tokenizer.chat_template = OURS["hermes"]
        self.spy = Spy(self.tokenizer)
        self.ours = Conversations(ChatTemplate(self.spy), {})  # type: ignore[arg-type]
        special = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        self.plain = PlainEpisode(self.render, self.end, special)
        self.spy.texts.clear()
        self.spoken: list[str] = []

    def render(self, chat: Any, tools: Any, reply: bool) -> str:
        readable = [{**m, "content": self.text(m)} for m in chat]
        if self.family == "qwen3":  # its template writes mappings and texts alike; ours are texts
            readable = [{**m, "tool_calls": m.get("tool_calls")} for m in readable]
        for message in readable:
            message["tool_calls"] = [self.call_of(call) for call in message.get("tool_calls") or []]
        options = {"tools": tools or None, "add_generation_prompt": reply, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(readable, **options))

    def end(self, calls: bool, tools: bool) -> str:
        return "<|eom_id|>" if self.family == "llama3" and calls and tools else self.last

    def call_of(self, call: Any) -> Any:
        template = self.ours.template.chat
        return template._readable_call({"id": call["id"], "type": "function", "function": call["function"]})

    @staticmethod
    def text(message: Any) -> str:
        content = message.get("content") or ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def call(
        self, messages: list[Any], wrote: str, tools: Any = (), *, excluded: str = "", ended: bool = True
    ) -> dict[str, Any]:
        """Ask; the policy writes this, in tokens that no tokenizer would choose. Returns its message."""
        body = {"model": "any", "messages": messages, **({"tools": list(tools)} if tools else {})}
        request = CHAT.read(json.loads(json.dumps(body)))
        prompt = self.ours.prompt(request.messages, request.tools)
        tokens = [token for letter in wrote for token in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        tokens += [self.tokenizer.convert_tokens_to_ids(self.last)] if ended else []
        number = len(self.ours.calls)
        log_probs = [-(number + 1) - index / 1000 for index in range(len(tokens))]
        sample = Sample(str(number), tokens, log_probs, "stop" if ended else "length", number)
        said = self.ours.template.parse(wrote, prompt.text, prompt.tools)
        id = next(self.ours.ids)
        made = self.ours.answer(prompt, sample, said, id, excluded=excluded, delivered=not excluded)
        answer = CHAT.answer(request, ChatAnswer(0, (Reply(made.id, made.reply, "stop"),)))
        reply: dict[str, Any] = answer["choices"][0]["message"]
        written = spelled(self.tokenizer, tokens)
        self.spoken.append(written)
        self.plain.call(messages, [dict(tool) for tool in request.tools], reply, written, not excluded)
        return reply

    def check(self) -> list[list[int]]:
        """Compare all; returns the calls of each trajectory."""
        lines = self.plain.trajectories()
        ours = trajectories(self.ours.calls)
        number = {id(call): index for index, call in enumerate(self.ours.calls)}
        kept = [[n for n in line if self.plain.calls[n].kept] for line in lines]
        assert [[number[id(call)] for call in one.calls] for one in ours] == kept
        seen: set[float] = set()
        for line, one in zip(kept, ours, strict=True):
            self.check_one(line[0], lines, one)
            trained = [p for p, m in zip(one.rollout_log_probs, one.response_mask, strict=True) if m]
            assert not seen & set(trained)  # each sampled token is trained once
            seen |= set(trained)
            for version, mask, p in zip(one.token_versions, one.response_mask, one.rollout_log_probs, strict=True):
                assert version == (int(-p) - 1 if mask else -1)
        counted = [call for call in self.ours.calls if not call.excluded]
        assert seen == {p for call in counted for p in call.sample.log_probs}
        # What the policy wrote was never tokenised; all else once.
        assert self.ours.reader.characters == self.plain.characters()
        context = sum(1 for _ in self.spy.texts) * max(len(name) for name in self.plain.special)
        assert sum(map(len, self.spy.texts)) <= self.plain.characters() + context
        return kept

    def check_one(self, first: int, lines: list[list[int]], one: Any) -> None:
        last = next(number for number, call in enumerate(self.ours.calls) if call is one.calls[-1])
        line = next(line for line in lines if last in line)
        numbers = [*self.plain.ancestors(self.plain.calls[line[0]].parent), *line[: line.index(last) + 1]]
        prompt, response = list[str](), list[tuple[str, int]]()
        for number in numbers:
            call = self.plain.calls[number]
            is_trained = call.kept and number in line
            if number < first or not response:
                prompt += [call.behind, *([] if is_trained else [call.wrote])]
                response += [(call.wrote, 1)] if is_trained else []
            else:
                response += [(call.behind, 0), (call.wrote, int(is_trained))]
        assert spelled(self.tokenizer, one.prompt_tokens) == "".join(prompt)
        parts = list[tuple[str, int]]()
        for text, mask in response:
            parts[-1:] = (
                [(parts[-1][0] + text, mask)] if parts and parts[-1][1] == mask else [*parts[-1:], (text, mask)]
            )
        runs = list[tuple[list[int], int]]()
        for token, mask in zip(one.response_tokens, one.response_mask, strict=True):
            if not runs or runs[-1][1] != mask:
                runs.append(([], mask))
            runs[-1][0].append(token)
        assert [(spelled(self.tokenizer, tokens), mask) for tokens, mask in runs] == parts


def retry(run: Both) -> None:
    run.call([SYSTEM, user("Add.")], "Let me", [ADD], excluded="aborted", ended=False)
    first = run.call([SYSTEM, user("Add.")], CALLS[run.family], [ADD])
    run.call([SYSTEM, user("Add."), first, result("4")], "It is 4.", [ADD])


def compaction(run: Both) -> None:
    chat = [SYSTEM, user("One.")]
    chat += [run.call(chat, "One it is."), user("Two.")]
    chat += [run.call(chat, "Two it is."), user("Three.")]
    run.call([SYSTEM, user("So far: one, two."), user("Three.")], "Three it is.")


def sub_agent(run: Both) -> None:
    chat, inner = [SYSTEM, user("Ask the other.")], [{"role": "system", "content": "You sum."}, user("2 + 2?")]
    chat += [run.call(chat, CALLS[run.family], [ADD])]
    inner += [run.call(inner, "Which two?"), user("Both.")]
    chat += [result("wait")]
    chat += [run.call(chat, CALLS[run.family], [ADD]), result("4")]
    run.call(inner, "Four.")
    run.call(chat, "It is four.", [ADD])


def parallel_calls(run: Both) -> None:
    chat = [user("Add twice.")]
    both = CALLS[run.family] if run.family in ("llama3", "mistral") else "Both.\n" + "\n".join([CALLS[run.family]] * 2)
    chat += [run.call(chat, both, [ADD])]
    chat += [result(str(n), call["id"]) for n, call in enumerate(chat[-1]["tool_calls"])]
    run.call(chat, "Four, and four.", [ADD])


def reordered_json(run: Both) -> None:
    chat = [user("Add.")]
    reply = run.call(chat, CALLS[run.family], [ADD])
    function = {"arguments": '{"a":2,"b":2}', "name": "add"}
    rewritten = {"tool_calls": [{"function": function, "id": "x", "type": "function"}], "role": "assistant"}
    assert reply["tool_calls"][0]["function"]["arguments"] == '{"b": 2, "a": 2}'
    run.call([{"content": [{"type": "text", "text": "Add."}], "role": "user"}, rewritten, result("4")], "4.", [ADD])


def dropped_thoughts(run: Both) -> None:
    chat = [user("Hello.")]
    chat += [run.call(chat, "<think>\nhm\n</think>\n\nHello."), user("And?")]
    chat += [run.call(chat, "<think>\nwell\n</think>\n\nFine."), user("Bye.")]
    run.call(chat, "Bye.")


def unsent_reasoning(run: Both) -> None:
    chat = [user("Add.")]
    for text in ("0", "4"):
        reply = run.call(chat, f"<think>\nI need {text}.\n</think>\n\n{CALLS[run.family]}", [ADD])
        chat += [{key: value for key, value in reply.items() if key != "reasoning_content"}, result(text)]
    run.call(chat, "<think>\nSo.\n</think>\n\nIt is 4.", [ADD])


def changed_system(run: Both) -> None:
    chat = [SYSTEM, user("Add.")]
    chat += [run.call(chat, CALLS[run.family], [ADD]), result("4")]
    run.call([{"role": "system", "content": "Finish."}, *chat[1:]], "4.")


def aborted_stream(run: Both) -> None:
    chat = [user("Write.")]
    chat += [run.call(chat, "Once."), user("On.")]
    run.call(chat, "Then", excluded="aborted", ended=False)
    run.call([*chat, user("Shorter.")], "Then it ended.")


def best_of_n(run: Both) -> None:
    chat = [user("Choose.")]
    replies = [run.call(chat, text) for text in ("A.", "B.", "B.", "C.")]
    run.call([*chat, replies[1], user("Why?")], "As it is.")
    run.call([*chat, replies[1], user("Sure?")], "Yes.")
    run.call([*chat, replies[1], user("Really?")], "No.")


def rewritten_history(run: Both) -> None:
    chat = [SYSTEM, user("Add.")]
    for text in ("4", "8"):
        reply = run.call(chat, CALLS[run.family], [ADD])
        called = f"Calling tools:\n{[call['function'] for call in reply['tool_calls']]}"
        chat += [{"role": "assistant", "content": called}, user(f"Observation:\n{text}")]
    run.call(chat, "8.", [ADD])


def many_turns(run: Both) -> None:
    chat = [SYSTEM, user("Begin.")]
    for turn in range(128):
        chat += [run.call(chat, f"Turn {turn}, it is blue.", ended=turn % 5 != 4), user(f"Why is it {turn}?")]


CONVERSATIONS: dict[Callable[[Both], None], list[list[int]]] = {
    retry: [[1, 2]],
    compaction: [[0, 1], [2]],
    sub_agent: [[0, 2, 4], [1, 3]],
    parallel_calls: [[0, 1]],
    reordered_json: [[0, 1]],
    dropped_thoughts: [[0], [1], [2]],
    unsent_reasoning: [[0, 1, 2]],
    changed_system: [[0], [1]],
    aborted_stream: [[0, 2]],
    best_of_n: [[0], [1, 4], [2, 5], [3], [6]],
    rewritten_history: [[0], [1], [2]],
    many_turns: [list(range(128))],
}
THINKING = (dropped_thoughts, unsent_reasoning)


def fits(conversation: Callable[[Both], None], family: str) -> bool:
    if conversation in THINKING:
        return family == "qwen3"
    return conversation is not many_turns or family == "hermes"


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("conversation", "family"),
    [
        pytest.param(conversation, family, id=f"{conversation.__name__}-{family}")
        for conversation in CONVERSATIONS
        for family in ("hermes", "qwen2.5", "qwen3", "llama3")
        if fits(conversation, family)
    ],
)
def test_a_hard_conversation_becomes_the_trajectories_of_the_reference(
    conversation: Callable[[Both], None], family: str
) -> None:
    run = Both(family)
    conversation(run)
    assert run.check() == CONVERSATIONS[conversation]


def test_random_conversations_become_the_trajectories_of_the_reference() -> None:
    for seed in range(15):
        rng = random.Random(seed)
        run = Both(rng.choice(["hermes", "qwen2.5", "qwen3"]))
        chats = [[SYSTEM, user("Go.")], [user("Go.")]]
        for number in range(12):
            chat = list(rng.choice(chats))
            excluded = rng.choice(["", "", "", "aborted"])
            thought = rng.choice(["", "<think>\nso\n</think>\n\n"]) if run.family == "qwen3" else ""
            text = thought + rng.choice(["Yes.", "No.", CALLS[run.family], "It is.\n" + CALLS[run.family]])
            reply = run.call(chat, text, [ADD], excluded=excluded, ended=rng.random() < 0.8)
            reply = {**reply, "reasoning_content": rng.choice([reply.get("reasoning_content"), None])}
            follows = result(str(number)) if reply.get("tool_calls") else user(rng.choice(["On.", "Off."]))
            chats.append([*chat, reply, follows])
        run.check()


def test_a_retokenised_turn_is_noticed() -> None:
    """The planted mistake: a turn whose tokens are those that the tokenizer would choose."""
    run = Both("hermes")
    chat = [user("Two plus two?")]
    chat += [run.call(chat, "It is four."), user("Sure?")]
    run.call(chat, "It is.")
    first = run.ours.calls[0].sample
    first.tokens[:] = run.tokenizer("It is four.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(first.tokens) < len(first.log_probs)
    with pytest.raises((AssertionError, ValueError)):
        run.check()


def test_usage_tells_cached_tokens_apart() -> None:
    run = Both("hermes")
    chat = [user("Two plus two?")]
    chat += [run.call(chat, "It is four."), user("Sure?")]
    run.call(chat, "It is.")
    first, second = (call.prompt for call in run.ours.calls)
    assert first.tokens == first.read
    assert len(second.tokens) == len(first.tokens) + len(run.ours.calls[0].sample.tokens) + len(second.read)


def test_a_fork_names_what_it_shares() -> None:
    run = Both("hermes")
    chat = [user("Choose.")]
    reply = run.call(chat, "A.")
    for why in ("Why?", "Where?"):
        run.call([*chat, reply, user(why)], "So.")
    one, fork = trajectories(run.ours.calls)
    assert one.parent is None and fork.parent is not None
    index, shared = fork.parent
    whole = [*one.prompt_tokens, *one.response_tokens]
    assert index == 0 and fork.prompt_tokens[:shared] == whole[:shared]
    assert shared == len(run.ours.calls[0].prompt.tokens) + len(run.ours.calls[0].sample.tokens)


def test_a_call_in_the_middle_that_is_left_out_is_read() -> None:
    run = Both("hermes")
    chat = [user("Add.")]
    chat += [run.call(chat, "One."), user("On.")]
    chat += [run.call(chat, "Two.", excluded="excluded"), user("On.")]
    run.call(chat, "Three.")
    assert run.check() == [[0, 2]]
    calls: list[Call] = run.ours.calls
    (one,) = trajectories(calls)
    assert sum(one.response_mask) == len(calls[0].sample.tokens) + len(calls[2].sample.tokens)
