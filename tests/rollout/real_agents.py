"""Agents on unmodified packages, run by the Python of an environment that has them: `python real_agents.py KIND`.

Each asks "2 + 2?" with a tool `add`; its last line is its reward as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
ROW = json.loads(sys.stdin.readline() or "{}")
QUESTION = "What is 2 + 2?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def openai_chat(stream: bool = False) -> str:
    import openai

    client, chat = openai.OpenAI(), [{"role": "user", "content": QUESTION}]
    while True:
        message: Any
        if stream:
            with client.chat.completions.stream(model="gpt-4o", messages=chat, tools=[TOOL]) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="gpt-4o", messages=chat, tools=[TOOL]).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        if stream:
            calls = [call.model_dump(exclude={"function": {"parsed_arguments"}}) for call in message.tool_calls]
            chat.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        else:
            chat.append(message)
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            chat.append({"role": "tool", "content": str(result), "tool_call_id": call.id})


def openai_responses(stream: bool = False) -> str:
    import openai

    client = openai.OpenAI()
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    while True:
        if stream:
            with client.responses.stream(model="gpt-4o", input=items, tools=[tool]) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(model="gpt-4o", input=items, tools=[tool])
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        items += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in answer.output]
        for call in calls:
            result = str(add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def anthropic_messages(stream: bool = False) -> str:
    import anthropic

    client = anthropic.Anthropic()
    chat: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
    options: Any = {"model": "claude-sonnet-4-5", "max_tokens": 64000, "tools": [tool]}
    assert client.messages.count_tokens(model="x", messages=chat).input_tokens > 0
    while True:
        if stream:
            with client.messages.stream(messages=chat, **options) as events:
                for _ in events:
                    pass
                answer = events.get_final_message()
        else:
            answer = client.with_options(timeout=60).messages.create(messages=chat, **options)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        chat.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(add(**c.input))} for c in calls]
        chat.append({"role": "user", "content": results})


def agents_sdk(responses: bool) -> str:
    import agents

    model: Any = "gpt-4o"
    if not responses:
        model = agents.OpenAIChatCompletionsModel(model="gpt-4o", openai_client=agents.AsyncOpenAI())
    agent = agents.Agent(name="Adder", instructions="Help.", model=model, tools=[agents.function_tool(add)])
    return str(agents.Runner.run_sync(agent, QUESTION).final_output)


def pydantic(model: str) -> str:
    from pydantic_ai import Agent

    agent = Agent(model, instructions="Help.", tools=[add])
    return str(asyncio.run(agent.run(QUESTION)).output)


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="gpt-4o"), [add])
    return str(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)


def litellm() -> str:
    import litellm

    chat: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        base = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
        answer = litellm.completion(model="openai/gpt-4o", messages=chat, tools=[TOOL], **base)
        message = answer.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        chat.append(message.model_dump())
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            chat.append({"role": "tool", "content": str(result), "tool_call_id": call.id})


def smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    base = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    agent = ToolCallingAgent(tools=[tool(add)], model=OpenAIServerModel("gpt-4o", **base), max_steps=3)
    return str(agent.run(QUESTION))


KINDS: dict[str, Callable[[], str]] = {
    "openai": openai_chat,
    "openai stream": lambda: openai_chat(True),
    "openai responses": openai_responses,
    "openai responses stream": lambda: openai_responses(True),
    "anthropic": anthropic_messages,
    "anthropic stream": lambda: anthropic_messages(True),
    "openai-agents": lambda: agents_sdk(False),
    "openai-agents responses": lambda: agents_sdk(True),
    "pydantic-ai": lambda: pydantic("openai-chat:gpt-4o"),
    "pydantic-ai responses": lambda: pydantic("openai:gpt-4o"),
    "pydantic-ai anthropic": lambda: pydantic("anthropic:claude-sonnet-4-5"),
    "langgraph": langgraph,
    "litellm": litellm,
    "smolagents": smolagents,
}
if __name__ == "__main__":
    print(json.dumps({"reward": float("4" in KINDS[sys.argv[1]]())}))
