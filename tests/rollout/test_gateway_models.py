"""Other models beside the policy, and requests that say how they are sampled."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.rollout.test_gateway_server import HELLO, Run, asking
from verl.errors import ConfigError
from verl.rollout.base import SamplingParams
from verl.rollout.gateway.gateway import Gateway

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


def test_addresses_of_models() -> None:
    for url in ("start", "judge", ""):
        with pytest.raises(ConfigError, match="'judge' is the address of a server"):
            Gateway("agent", models={"judge": url})


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
