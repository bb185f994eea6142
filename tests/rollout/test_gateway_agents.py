"""Unmodified agent packages against the gateway, each as a command in an environment that has them
(`benchmarks/peer_env.sh agents`): their calls become the trajectories that are expected."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agent_packages import PYTHON, ROOT
from tests.rollout.test_gateway_server import CALL, Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON.exists(), reason="`benchmarks/peer_env.sh agents` makes the environment"),
]
THOUGHT = "\n\nLet me compute. "
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "4"}}\n</tool_call><|im_end|>'


def play(kind: str, turns: list[str], **options: Any) -> Run:
    return Run([str(PYTHON), str(ROOT / "tests" / "rollout" / "real_agents.py"), kind], turns, **options)


@pytest.mark.parametrize(
    "kind",
    [
        "openai", "openai stream", "openai responses", "openai responses stream", "anthropic", "anthropic stream",
        "openai-agents", "openai-agents responses", "pydantic-ai", "pydantic-ai responses", "pydantic-ai anthropic",
        "langgraph", "litellm",
    ],
)  # fmt: skip
def test_an_episode_is_one_trajectory(kind: str) -> None:
    two = CALL.replace("<|im_end|>", "\n") + CALL
    run = play(kind, [THOUGHT + two, CALL, "It is 4.<|im_end|>"])
    (turns,) = run.outcome.responses or [None]
    assert turns is not None, run.outcome.error
    assert turns.reward == 1.0 and len(run.record.trajectories[0].calls) == 3 and not run.record.excluded
    wrote = [run.engine.tokenizer.decode(call.sample.tokens) for call in run.record.calls]
    assert wrote == [THOUGHT + two, CALL, "It is 4.<|im_end|>"]
    # Of strict tools that is all but the tokens that their grammar left no choice for.
    is_strict = kind.startswith(("openai-agents", "pydantic-ai")) and "anthropic" not in kind
    assert (sum(turns.response_mask) < sum(len(call.sample.tokens) for call in run.record.calls)) == is_strict


@pytest.mark.parametrize("kind", ["openai", "openai stream", "anthropic", "openai-agents", "langgraph"])
def test_an_agent_in_the_sandbox(kind: str) -> None:
    run = play(kind, [CALL, "It is 4.<|im_end|>"], sandbox=True)
    (turns,) = run.outcome.responses or [None]
    assert turns is not None, run.outcome.error
    assert turns.reward == 1.0 and len(run.record.trajectories[0].calls) == 2


def test_smolagents_rewrites_its_history() -> None:
    run = play("smolagents", [CALL, FINAL])
    assert len(run.records) == 1, run.outcome.error
    assert [len(one.calls) for one in run.records[0].trajectories] == [1, 1]
