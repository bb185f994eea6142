"""An assistant on the `openai` package that adds numbers up with a tool. It knows nothing of training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/agent/assistant.py 31 47
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
#: What was asked before: a small model sees here how a call is written.
EARLIER = [(35, 62), (18, 54)]


def history() -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for a, b in EARLIER:
        name, total = f"call_{a}", str(a + b)
        call = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
        messages += [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": name, "content": total},
            {"role": "assistant", "content": total},
        ]
    return messages


def add(arguments: str) -> str:
    """The tool: what it answers to arguments as the model wrote them."""
    try:
        numbers = json.loads(arguments)
        return str(numbers["a"] + numbers["b"])
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


async def assistant(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """Answers `row["prompt"]`, in at most three replies.

    Returns:
        1.0 if the answer is `row["answer"]`, else 0.2 if the tool said it.
    """
    messages: list[Any] = [*history(), {"role": "user", "content": row["prompt"]}]
    results: list[str] = []
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                results.append(add(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
    if (message.content or "").strip() == row["answer"]:
        return 1.0
    return 0.2 if row["answer"] in results else 0.0


if __name__ == "__main__":
    first, second = map(int, sys.argv[1:])
    question = {"prompt": f"What is {first} + {second}?", "answer": str(first + second)}
    print(asyncio.run(assistant(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], question)))
