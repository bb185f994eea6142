"""What unmodified packages send (recorded on 2026-11-25: openai 3.57, openai-agents 0.24, anthropic 2.13, pydantic-ai
2.68, langgraph 1.2 with langchain-openai 1.7, smolagents 1.26, litellm 1.110): the fields of their first request, with
a tool `add`; the system prompts are shorter."""

from __future__ import annotations

from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": {**_ADD, "strict": True}}
FLAT_TOOL: dict[str, Any] = {"type": "function", **_ADD, "strict": True}
ANTHROPIC_TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
_FINAL = {"type": "function", "function": {"name": "final_answer", "description": "", "parameters": {"type": "object"}}}
_ASK = [{"role": "user", "content": "What is 2 + 2?"}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]
_FORM = {"type": "json_schema", "json_schema": {"name": "Sum", "schema": SCHEMA, "strict": True}}

CHAT: dict[str, dict[str, Any]] = {
    "openai": {"messages": _ASK, "model": "gpt-4o", "tools": [CHAT_TOOL]},
    "openai stream": {"messages": _ASK, "model": "gpt-4o", "stream": True},
    "openai parse": {"messages": _ASK, "model": "gpt-4o", "stream": False, "response_format": _FORM},
    "openai-agents": {"messages": _ASK, "model": "gpt-4o", "tools": [CHAT_TOOL]},
    "pydantic-ai": {
        "messages": _ASK, "model": "gpt-4o", "stream": False, "tool_choice": "auto", "tools": [CHAT_TOOL],
    },
    "pydantic-ai stream": {
        "messages": _ASK, "model": "gpt-4o", "stream": True, "stream_options": {"include_usage": True},
        "tool_choice": "auto", "tools": [CHAT_TOOL],
    },
    "pydantic-ai output": {
        "messages": _ASK, "model": "gpt-4o", "tool_choice": "required", "tools": [CHAT_TOOL, _FINAL],
    },
    "langgraph": {"messages": _ASK, "model": "gpt-4o", "stream": False, "tools": [CHAT_TOOL]},
    "smolagents": {
        "messages": _PARTS, "model": "gpt-4o", "stop": ["Observation:", "Calling tools:"], "tool_choice": "required",
        "tools": [CHAT_TOOL, _FINAL],
    },
    "smolagents code": {"messages": _PARTS, "model": "gpt-4o", "stop": ["Observation:", "</code>"]},
    "litellm hosted_vllm": {"model": "policy", "messages": _ASK, "temperature": 0, "stream": False},
}  # fmt: skip
RESPONSES: dict[str, dict[str, Any]] = {
    "openai-agents": {
        "include": [], "input": _ASK, "instructions": "Help.", "model": "gpt-4o", "tools": [FLAT_TOOL],
    },
    "openai-agents stream": {"include": [], "input": _ASK, "model": "gpt-4o", "tools": [FLAT_TOOL], "stream": True},
    "pydantic-ai": {
        "input": _ASK, "model": "gpt-4o", "stream": False, "tool_choice": "auto", "tools": [FLAT_TOOL],
    },
}  # fmt: skip
ANTHROPIC: dict[str, dict[str, Any]] = {
    "anthropic": {"max_tokens": 1024, "messages": _ASK, "model": "claude-sonnet-4-5", "tools": [ANTHROPIC_TOOL]},
    "anthropic stream": {
        "max_tokens": 1024, "messages": _ASK, "model": "claude-sonnet-4-5", "stream": True,
        "system": [{"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}}],
    },
    "pydantic-ai": {
        "max_tokens": 64000, "messages": _PARTS, "model": "claude-sonnet-4-5", "stream": True,
        "tool_choice": {"type": "auto"}, "tools": [ANTHROPIC_TOOL],
    },
    "langchain-anthropic": {"max_tokens": 64000, "messages": _ASK, "model": "claude-sonnet-4-5"},
}  # fmt: skip
