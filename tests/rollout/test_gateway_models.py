"""Other models beside the policy, and requests that say how they are sampled."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.rollout.learned import check_learned
from tests.rollout.test_gateway_server import HELLO, Broken, Run, asking, post
from tests.rollout.test_tools import Scripted
from tests.templates import TOOL_FAMILIES
from verl.batch import Batch
from verl.dataflow.scores import episode_metrics
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import Sample, SamplingParams
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.turns import episode_rows

pytest.importorskip("aiohttp")


class Judge(BaseHTTPRequestHandler):
    asked: list[tuple[str, dict[str, str], Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(429 if body["model"] == "busy" else 200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.end_headers()
        self.wfile.write(b"data: [DONE]\n\n" if body.get("stream") else b'{"says": "good"}')

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def judge() -> Iterator[tuple[str, list[Any]]]:
    Judge.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_port}/v1", Judge.asked
        other.shutdown()


def test_another_model_is_asked_as_it_is_and_never_trained(judge: tuple[str, list[Any]]) -> None:
    url, asked = judge
    seen: list[httpx.Response] = []
    bodies = [
        {"model": "judge", "messages": HELLO, "audio": {}},
        {"model": "judge", "messages": HELLO, "stream": True},
        {"model": "busy", "messages": HELLO},
        {"model": "nobody", "messages": HELLO},
        {"model": "broken", "messages": HELLO},
        {"model": "gpt-4o", "messages": HELLO},
    ]
    models = {"judge": url, "busy": url + "/", "nobody": None, "broken": "http://127.0.0.1:1/v1"}
    run = Run(asking(seen, *bodies), models=models)
    assert [answer.status_code for answer in seen] == [200, 200, 429, 404, 502, 200]
    assert seen[0].json() == {"says": "good"} and seen[1].text == "data: [DONE]\n\n"
    assert seen[1].headers["content-type"] == "text/event-stream"
    assert seen[3].json()["error"]["code"] == "model_not_found" and "'nobody'" in seen[3].text
    assert [path for path, _, _ in asked] == ["/v1/chat/completions"] * 3 and asked[0][2] == bodies[0]
    assert all("authorization" not in headers for _, headers, _ in asked)  # the key is none of its business
    assert len(run.record.calls) == 1 and len(run.engine.requests) == 1
    assert run.record.others == {"judge": 2}  # that answered


def test_addresses_of_models() -> None:
    for url in ("judge", ""):
        with pytest.raises(ConfigError, match="'judge' is 'start' or the address of a server"):
            Gateway("sh agent", models={"judge": url})
    for url, asks_start in (("start", True), (None, False)):
        assert Gateway("sh agent", models={"judge": url}).asks_start == asks_start


KEY, PLACE = "sk-of-the-judge", "http://127.0.0.1:1/v1"


def test_a_key_goes_to_its_own_server_alone(judge: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = judge
    monkeypatch.setenv("JUDGE_KEY", KEY)
    seen: list[httpx.Response] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        for path in ("/chat/completions", "/messages"):
            for model in ("judge", "plain"):
                body = {"model": model, "messages": HELLO, "max_tokens": 9}
                seen.append(post(base_url, api_key, body, path, **{"anthropic-version": "2023-06-01"}))
        monkeypatch.delenv("JUDGE_KEY")  # as on another machine
        seen.append(post(base_url, api_key, {"model": "judge", "messages": HELLO}))
        post(base_url, api_key, {"messages": HELLO})
        return 1.0

    run = Run(agent, models={"judge": url, "plain": url}, model_keys={"judge": "JUDGE_KEY"})
    assert [answer.status_code for answer in seen] == [200] * 4 + [502] and "the variable JUDGE_KEY" in seen[4].text
    assert run.record.others == {"judge": 2, "plain": 2} and KEY not in repr(vars(run.gateway))
    keys = [(headers.get("authorization"), headers.get("x-api-key")) for _, headers, _ in asked]
    assert keys == [(f"Bearer {KEY}", None), (None, None), (None, KEY), (None, None)]
    assert all(headers["anthropic-version"] == "2023-06-01" for _, headers, _ in asked)


@pytest.mark.parametrize(
    ("models", "keys", "message"),
    [
        ({"judge": PLACE}, {"judge": "NO_SUCH_KEY"}, "'judge' has its key in the variable NO_SUCH_KEY, which"),
        ({"judge": PLACE}, {"juge": "JUDGE_KEY"}, "'juge' is no server of models.*judge"),
        ({"judge": None}, {"judge": "JUDGE_KEY"}, "'judge' is no server of models"),
        ({"judge": "start"}, {"judge": "JUDGE_KEY"}, "'judge' is no server of models"),
        ({"judge": "http://judge.example.org/v1"}, {"judge": "JUDGE_KEY"}, "'judge' has a key, which http would show"),
        ({"judge": PLACE}, {"judge": "BAD_KEY"}, "no HTTP header can carry"),
    ],
)
def test_keys_that_are_refused(monkeypatch: pytest.MonkeyPatch, models: Any, keys: Any, message: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("BAD_KEY", "schlüssel")
    with pytest.raises(ConfigError, match=message):
        Gateway("sh agent", models=models, model_keys=keys)


def test_keys_that_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for url in ("http://localhost:8000/v1", "http://[::1]:8000/v1", "https://judge.example.org/v1"):
        Gateway("sh agent", models={"judge": url}, model_keys={"judge": "JUDGE_KEY"})


def test_another_model_that_is_late() -> None:
    """One that says nothing, and one that stops in the middle, which can only be cut off."""
    seen: list[Any] = []

    def serve(listener: socket.socket) -> None:
        for said in (b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nHi\r\n"):
            link, _ = listener.accept()
            links.append(link)
            link.sendall(said)

    def agent(base_url: str, api_key: str, row: Any) -> float:
        seen.append(post(base_url, api_key, {"model": "judge", "messages": HELLO}))
        with pytest.raises(httpx.TransportError):
            post(base_url, api_key, {"model": "judge", "messages": HELLO})
        post(base_url, api_key, {"messages": HELLO})
        return 1.0

    links: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        run = Run(agent, models={"judge": url}, model_deadline=0.4)
    for link in links:
        link.close()
    assert seen[0].status_code == 502 and "'judge' cannot be asked: no answer in 0.4 s" in seen[0].text
    assert run.record.others == {} and len(run.record.calls) == 1


# The weights that training began with.


def starting(*turns: str, engine: type[Scripted] = Scripted) -> Scripted:
    return engine(TOOL_FAMILIES["qwen2.5"].make(), turns)


def test_the_starting_weights_answer_as_the_policy_does_and_are_never_trained() -> None:
    seen: list[httpx.Response] = []
    ask = {"model": "judge", "messages": [{"role": "system", "content": "Judge."}, *HELLO]}
    bodies = [
        {"model": "any", "messages": HELLO, "temperature": 0.2},
        {**ask, "temperature": 0, "top_p": 0.5, "stop": ["###"], "n": 2},
        {**ask, "stream": True, "temperature": 0.2},
        {**ask, "seed": 3},
        {"model": "judge", "messages": [], "n": 1},
    ]
    start = starting("Good ###", "Bad.<|im_end|>", "Fair.<|im_end|>")
    run = Run(asking(seen, *bodies), ["Hi.<|im_end|>"], start=start, models={"judge": "start"})
    assert [answer.status_code for answer in seen] == [200, 200, 200, 400, 400]
    said = [choice["message"]["content"] for choice in seen[1].json()["choices"]]
    assert said == ["Good ", "Bad."] and '"Fair."' in seen[2].text and seen[3].json()["error"]["param"] == "seed"
    sampled = [(request.id, request.params.temperature, request.params.top_p) for request in start.requests]
    assert sampled == [("a@start", 0.0, 0.5), ("a@start#1", 0.0, 0.5), ("a@start#2", 0.2, 1.0)]
    assert [request.params.temperature for request in run.engine.requests] == [1.0]  # the run's own
    assert len(run.record.calls) == len(run.record.trajectories) == 1 and run.record.others == {"judge": 2}
    assert not run.record.excluded
    check_learned(run.outcome, run.engine.tokenizer, ["Hi.<|im_end|>"], 1.0)


def test_a_reply_of_the_starting_weights_has_no_reward() -> None:
    """Its id is none of the policy's calls, of which the first would have the same number."""

    def agent(base_url: str, api_key: str, row: Any) -> Any:
        ids = [post(base_url, api_key, {"model": m, "messages": HELLO}).json()["id"] for m in ("policy", "judge")]
        return {"reward": 1.0, "calls": {ids[1]: 0.5}}

    run = Run(agent, start=starting("So.<|im_end|>"), models={"judge": "start"})
    assert "the agent gave 'chatcmpl-start000000' a reward, and no call has that name or id" in str(run.outcome.error)


def test_what_other_models_answered_is_counted_apart() -> None:
    def metrics(*bodies: Any) -> dict[str, float]:
        start, models = starting("So.<|im_end|>"), {"judge": "start"}
        run = Run(asking([], *bodies), ["Hi.<|im_end|>"] * 2, start=start, models=models)
        prompts = Batch.from_columns({"id": ["a"], "prompt_tokens": [[1]]})
        rows = episode_rows(prompts, [run.outcome], version=0)
        return episode_metrics(rows.add({"reward": [1.0] * len(rows)}))

    ours = metrics({"messages": HELLO}, {"messages": HELLO})
    theirs = metrics({"messages": HELLO}, {"model": "judge", "messages": HELLO}, {"messages": HELLO})
    assert theirs == {**ours, "calls/other/judge": 1}


def test_starting_weights_that_are_not_there_end_the_run_by_name() -> None:
    with pytest.raises(RolloutError, match="'start' is for synchronous training in one process"):
        Run(asking([], {"messages": HELLO}), models={"judge": "start"})


def test_a_fault_of_the_starting_weights_is_none_of_the_agent() -> None:
    seen: list[httpx.Response] = []
    ask = {"model": "judge", "messages": HELLO}
    models: dict[str, Any] = {"judge": "start"}
    run = Run(asking(seen, {"messages": HELLO}, ask), ["Hi."] * 2, start=starting(engine=Broken), models=models)
    assert [answer.status_code for answer in seen] == [200, 503] * 2
    assert run.outcome.reason == "fault" and "twice: no weights" in str(run.outcome.error)


class Halting(Scripted):
    def step(self) -> list[Sample]:
        raise RuntimeError("out of memory")


def test_an_engine_of_the_starting_weights_that_fails_ends_the_run() -> None:
    agent = asking([], {"model": "judge", "messages": HELLO})
    with pytest.raises(RuntimeError, match="out of memory"):
        Run(agent, start=starting(engine=Halting), models={"judge": "start"})


@pytest.mark.parametrize("sampling", ["run", "agent"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_requests_say_how_greedy_rows_are_sampled(sampling: Any, temperature: float) -> None:
    seen: list[httpx.Response] = []
    wanted = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0}
    params = SamplingParams(max_new_tokens=100, temperature=temperature)
    bodies = [{"messages": HELLO, **wanted}, {"messages": HELLO}]
    run = Run(asking(seen, *bodies), ["Hi.<|im_end|>"] * 2, params=params, sampling=sampling)
    used = [(request.params.temperature, request.params.top_p) for request in run.engine.requests]
    first = (0.5, 0.9) if sampling == "agent" and not temperature else (temperature, 1.0)
    assert used == [first, (temperature, 1.0)]


@pytest.mark.parametrize("wanted", [{"seed": 7}, {"temperature": -1}, {"top_p": "high"}, {"logit_bias": {"5": 1}}])
def test_a_way_of_sampling_that_cannot_be_had(wanted: dict[str, Any]) -> None:
    seen: list[httpx.Response] = []
    params = SamplingParams(max_new_tokens=100, temperature=0.0)
    Run(asking(seen, {"messages": HELLO, **wanted}), params=params, sampling="agent")
    assert seen[0].status_code == 400 and seen[0].json()["error"]["param"] == next(iter(wanted))
