"""Asks through the packages `openai` and `anthropic` what the row says, and writes down what they make of each answer:
run by the Python of an environment that has them, as an agent's command."""

from __future__ import annotations

import inspect
import json
import operator
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai

KINDS: dict[str, Any] = {"openai": openai.OpenAI, "anthropic": anthropic.Anthropic}


def trickle() -> Iterator[bytes]:
    for _ in range(20):
        yield b" "
        time.sleep(0.1)


def plain(value: Any) -> Any:
    return value.model_dump(mode="json", warnings=False) if hasattr(value, "model_dump") else value


def ask(package: str, call: str, fields: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What the client makes of one call: its answer (of a stream, its events), or its error."""
    client = KINDS[package](**{"max_retries": 0, **options})
    method = operator.attrgetter(call)(client)
    if call == "post" and fields.get("content") == "trickle":
        fields = {**fields, "content": trickle()}
    known = inspect.signature(method).parameters
    body = {name: value for name, value in fields.items() if name not in known}
    named = {name: value for name, value in fields.items() if name in known}
    if call in ("get", "post"):
        named["cast_to"] = object
    try:
        answer = method(**named, **({"extra_body": body} if body else {}))
        return {"answer": [plain(event) for event in answer] if fields.get("stream") else plain(answer)}
    except (openai.APIError, anthropic.APIError) as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        of_status = {name: getattr(error, name, None) for name in ("status_code", "code", "type")}
        return {"error": kinds, "message": str(error), **of_status}


def main() -> None:
    row = json.loads(sys.stdin.readline())
    asks = row["asks"]
    with ThreadPoolExecutor(len(asks) if row.get("at_once") else 1) as pool:
        seen = list(pool.map(lambda each: ask(*each), asks))
    Path(row["out"]).write_text(json.dumps(seen))
    print(json.dumps({"reward": 1.0}))


if __name__ == "__main__":
    main()
