"""CPU milliseconds that the gateway spends on a call, by the length of its history, beside an engine that answers at
once: reading, linking, rendering, tokenising, parsing and answering, without HTTP.

    python benchmarks/gateway.py [--model models/SmolLM2-135M-Instruct] [--tokens 8000]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from transformers import AutoTokenizer

from verl.rollout.base import Sample
from verl.rollout.gateway.dialects.chat import CHAT
from verl.rollout.gateway.dialects.form import ChatAnswer, Reply
from verl.rollout.gateway.linking import Conversations
from verl.rollout.gateway.template import ChatTemplate

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = ' <tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
TEXT = "The quick brown fox jumps over the lazy dog and so on, then it goes home to sleep. " * 3


def conversation(template: ChatTemplate, limit: int) -> list[tuple[int, float]]:
    """Of each call of a conversation up to `limit` tokens, the tokens of its prompt and the milliseconds."""
    tokenizer = template.chat.tokenizer
    episode, chat, calls = Conversations(template), list[Any]([{"role": "user", "content": "Begin."}]), []
    while not calls or calls[-1][0] < limit:
        body = json.dumps({"model": "any", "messages": chat, "tools": [TOOL]}).encode()
        says_call = len(calls) % 2 == 1
        tokens = tokenizer(TEXT + CALL * says_call, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        start = time.process_time()
        request = CHAT.read(json.loads(body))
        prompt = episode.ask(request.messages, request.tools)
        length = len(prompt.tokens)
        reply = template.parse(template.text(tokens), prompt.text, prompt.tools)
        call = episode.answer(prompt, Sample("", tokens, [0.0] * len(tokens), "stop", 0), reply)
        answer = CHAT.answer(request, ChatAnswer("any", 0, (Reply(call.id, call.reply, "stop"),)))
        json.dumps(answer)
        calls.append((length, (time.process_time() - start) * 1e3))
        chat += [answer["choices"][0]["message"], {"role": "tool" if says_call else "user", "content": TEXT}]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--episodes", type=int, default=5)
    options = parser.parse_args()
    template = ChatTemplate(AutoTokenizer.from_pretrained(options.model), "hermes")
    calls = [call for _ in range(options.episodes) for call in conversation(template, options.tokens)]
    for start in range(0, options.tokens, 2000):
        taken = sorted(ms for length, ms in calls if start <= length < start + 2000)
        median, late = taken[len(taken) // 2], taken[int(len(taken) * 0.95)]
        print(f"{start:6d} to {start + 2000:6d} tokens of history: median {median:5.1f} ms, p95 {late:5.1f} ms")


if __name__ == "__main__":
    main()
