"""What is learned of an episode behind the gateway: every reason for which a call is not trained, and everything that
an episode may come to, beside the plain reference."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rollout.learned import check_learned
from tests.rollout.test_gateway_server import ADD, HELLO, Broken, Run, asking_again, failing, post
from tests.rollout.test_tools import Scripted
from verl.rollout.base import Sample

pytest.importorskip("aiohttp")
OTHER = [{"role": "user", "content": "Something else."}]
TURNS = ["Work.<|im_end|>", "Beside.<|im_end|>", "More.<|im_end|>"]
WORK, BESIDE = TURNS[:2]


class Hanging(Scripted):
    """Answers the first request; others never, until they are aborted."""

    def step(self) -> list[Sample]:
        first, self._new = self._new[: not self.answered], self._new[not self.answered :]
        done = [Sample(request.id, [], [], "abort", 3) for request in self._new if request.id in self.gone]
        later = [request for request in self._new if request.id not in self.gone]
        self._new = first
        self.answered += len(first)
        answers = super().step()
        self._new = later
        time.sleep(0.01)
        return [*answers, *done]

    answered = 0
    gone: frozenset[str] = frozenset()

    def abort(self, ids: Iterable[str]) -> None:
        self.gone |= {*ids}


def test_aborted() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> float:
        post(base_url, api_key, {"messages": HELLO})
        auth = {"Authorization": f"Bearer {api_key}"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base_url}/chat/completions", json={"messages": OTHER}, headers=auth, timeout=0.3)
        end = time.monotonic() + 5
        while not engines[0].gone and time.monotonic() < end:
            time.sleep(0.01)
        return 1.0

    engines: list[Hanging] = []

    class Watched(Hanging):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

    run = Run(agent, TURNS, engine=Watched)
    assert run.record.excluded == {"aborted": 1}
    check_learned(run.outcome, run.engine.tokenizer, [WORK], 1.0)


def test_late() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> float:
        def later() -> None:
            with pytest.raises(httpx.HTTPError):
                post(base_url, api_key, {"messages": OTHER}).raise_for_status()

        post(base_url, api_key, {"messages": HELLO})
        threads.append(threading.Thread(target=later))
        threads[0].start()
        time.sleep(0.3)
        return 1.0

    threads: list[threading.Thread] = []
    run = Run(agent, TURNS, engine=Hanging)
    threads[0].join()
    check_learned(run.outcome, run.engine.tokenizer, [WORK], 1.0)


def test_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(asking_again(monkeypatch), TURNS)
    assert run.record.excluded == {"retried": 1}
    check_learned(run.outcome, run.engine.tokenizer, [BESIDE], 1.0)


def two_calls(second: dict[str, Any], **headers: str) -> Callable[..., float]:
    def agent(base_url: str, api_key: str, row: Any) -> float:
        post(base_url, api_key, {"messages": HELLO, "tools": [ADD]})
        post(base_url, api_key, second, **headers)
        return 1.0

    return agent


@pytest.mark.parametrize(
    ("second", "headers", "options", "reason", "trained"),
    [
        ({"messages": OTHER, "tools": [ADD]}, {}, {}, None, [WORK, BESIDE]),
        ({"messages": HELLO, "tools": [ADD]}, {}, {}, None, [WORK, BESIDE]),  # equal requests: best of two
        ({"messages": OTHER}, {}, {}, None, [WORK, BESIDE]),  # a last call without tools
        ({"messages": OTHER, "tools": [ADD]}, {"X-Verl-Train": "0"}, {}, "excluded", [WORK]),
        (
            {"messages": OTHER, "tools": [ADD]},
            {},
            {"train": lambda call: "Bes" in call.reply.content},
            "excluded",
            [BESIDE],
        ),
        ({"messages": OTHER, "tools": [ADD]}, {}, {"train": lambda call: False}, "excluded", []),
        ({"messages": OTHER, "tools": [ADD]}, {}, {"max_calls": 1}, None, [WORK]),  # the bound refuses it
    ],
)
def test_a_branch(second: Any, headers: Any, options: Any, reason: str | None, trained: list[str]) -> None:
    run = Run(two_calls(second, **headers), TURNS, **options)
    assert run.record.excluded == ({} if reason is None else {reason: 2 - len(trained)})
    assert run.record.truncated == any(turns.truncated for turns in run.outcome.responses) == ("max_calls" in options)
    check_learned(run.outcome, run.engine.tokenizer, trained, 1.0)


def test_a_planner_a_worker_with_a_tool_and_a_writer_all_learn() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> dict[str, Any]:
        post(base_url, api_key, {"messages": OTHER}, **{"X-Verl-Name": "planner"})
        post(base_url, api_key, {"messages": HELLO, "tools": [ADD]})
        report = [{"role": "user", "content": "Write the report."}]
        answer = post(base_url, api_key, {"messages": report}, **{"X-Verl-Name": "writer"}).json()
        return {"reward": 1.0, "trajectories": {"writer": 0.5}, "calls": {answer["id"]: 0.25}}

    run = Run(agent, TURNS)
    assert run.record.excluded == {}
    assert [turns.name for turns in run.outcome.responses] == ["planner", "", "writer"]
    writer = run.outcome.responses[-1]
    assert writer.own_reward == 0.5 and writer.call_rewards == {len(writer.response_tokens) - 1: 0.25}
    same = Run(lambda *given: agent(*given)["reward"], TURNS)
    check_learned(same.outcome, same.engine.tokenizer, TURNS, 1.0)


@pytest.mark.parametrize(
    ("results", "options", "reason", "reward"),
    [
        ([ValueError("no tool")], {}, "raised", None),
        ([ValueError("no tool")], {"on_agent_error": 0.0}, None, 0.0),
        ([lambda: time.sleep(3), 1.0], {"deadline": 1.0}, None, 1.0),  # tried once more
        ([lambda: time.sleep(3), lambda: time.sleep(3)], {"deadline": 1.0}, "late", None),
        ([None], {}, None, None),  # no reward
        ([float("nan")], {}, "raised", None),
    ],
)
def test_how_an_agent_ends(results: Any, options: Any, reason: str | None, reward: float | None) -> None:
    run = Run(failing(*results), TURNS, **options)
    assert run.outcome.reason == reason
    check_learned(run.outcome, run.engine.tokenizer, [WORK if len(results) == 1 else BESIDE], reward)


def test_no_call_and_a_fault_of_the_engine() -> None:
    silent = Run(lambda base_url, api_key, row: 1.0)
    broken = Run(failing(1.0, 1.0), engine=Broken)
    assert (silent.outcome.reason, broken.outcome.reason) == ("no_call", "fault")
    for run in (silent, broken):
        check_learned(run.outcome, run.engine.tokenizer, [], None)


def test_a_command_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    run = Run([sys.executable, str(script)])
    assert run.outcome.reason == "killed"
    check_learned(run.outcome, run.engine.tokenizer, [], None)


def test_a_context_that_is_used_up_counts() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> float:
        post(base_url, api_key, {"messages": HELLO})
        assert post(base_url, api_key, {"messages": [*HELLO, *HELLO] * 40}).status_code == 400
        return 1.0

    run = Run(agent, TURNS, max_length=200)
    assert run.outcome.responses[0].truncated
    check_learned(run.outcome, run.engine.tokenizer, [WORK], 1.0)
