"""Servers that die, hang or answer nonsense: another server answers, or the sample abstains and is logged."""

from __future__ import annotations

import asyncio
import re
import resource
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

import verl
from tests.conftest import Plain
from tests.rollout.plain_server import BODIES
from verl._host.http_servers import _MAX_BYTES, NoServerError, Server, ServerPool, _most_bytes
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import Request, Sample, SamplingParams, generate
from verl.rollout.grammar import Grammar
from verl.rollout.remote import RemoteEngine, ServerEngine
from verl.rollout.vllm.requests import sampling_arguments
from verl.weights.shard import Shard
from verl.weights.shards import model_shards

PARAMS = SamplingParams(max_new_tokens=6)


def engine(
    *servers: Plain, path: str = "", timeout: float = 20.0, retries: int = 3, model: object = None
) -> ServerEngine:
    pool = ServerPool(
        [server.url + path for server in servers], timeout=timeout, retries=retries, kind="rollout server"
    )
    return ServerEngine(pool, model, eos_token_ids=(2,), seed=0)  # type: ignore[arg-type]


def requests(prompts: int, n: int, params: SamplingParams = PARAMS) -> list[Request]:
    return [Request(f"{row}/{i}", [20, 30 + row], params) for row in range(prompts) for i in range(n)]


def whole(sample: Sample) -> bool:
    row = int(sample.id.split("/")[0])
    return sample.tokens == [(50 + row + i) % 40 + 10 for i in range(6)] and len(set(sample.log_probs)) == 1


@pytest.mark.parametrize("path", ["", "/v1", "/generate"])
def test_samples_stick_to_their_prompts_server_whichever_path_is_given(serve: Callable[..., Plain], path: str) -> None:
    remote = engine(*(serve(name) for name in (1, 2, 3)), path=path)
    samples = list(generate(remote, requests(9, 2)))
    assert len(samples) == 18 and all(map(whole, samples))
    writers = {row: {s.log_probs[0] for s in samples if s.id.startswith(f"{row}/")} for row in range(9)}
    assert all(len(names) == 1 for names in writers.values())
    assert set.union(*writers.values()) == {-1.0, -2.0, -3.0}


def test_calls_that_begin_together_ask_for_the_models_name_once(
    serve: Callable[..., Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send = ServerPool.send

    async def noted(self: ServerPool, server: Server, path: str, *args: object, **options: object) -> object:
        asked.append(path)
        return await send(self, server, path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerPool, "send", noted)
    assert len(list(generate(engine(serve(1), serve(2), path="/v1"), requests(4, 2)))) == 8
    assert asked.count("/v1/models") == 1


def test_a_server_is_left_nothing_to_take_from_the_models_generation_config() -> None:
    # What vLLM's servers read there (`ModelConfig.get_diff_sampling_param`).
    sent = sampling_arguments(Request("a", [5], SamplingParams()), 0, (2,), 8)
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "temperature": 1, "top_k": 0}
    assert sent | neutral | {"top_p": 1, "min_p": 0} == sent and sent["max_tokens"] == 8


def test_a_prompt_leaves_a_server_that_has_much_more_to_do(serve: Callable[..., Plain]) -> None:
    remote = engine(serve(1, "slow"), serve(2, "slow"))
    samples = list(generate(remote, requests(1, 40)))
    shares = [sum(s.log_probs[0] == -name for s in samples) for name in (1, 2)]
    assert sum(shares) == 40 and min(shares) >= 10


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("mode", ["hang", "error", "nonsense"])
def test_what_a_bad_server_does_not_answer_a_good_one_does(
    serve: Callable[..., Plain], make_model: Callable[..., PreTrainedModel], mode: str
) -> None:
    model = make_model("llama")
    remote = engine(serve(1, mode), serve(2), timeout=1.0 if mode == "hang" else 20.0, model=model)
    samples = list(generate(remote, requests(6, 3)))
    assert len(samples) == 18 and all(map(whole, samples))
    assert {s.log_probs[0] for s in samples} == {-2.0}


def test_answers_that_are_none_are_failures(serve: Callable[..., Plain], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off, endless, dripping, redirected, not HTTP: each at a server of its own beside a good one."""
    monkeypatch.setattr("verl._host.http_servers._MAX_BYTES", 1 << 20)
    bad = [serve(1, mode) for mode in BODIES]
    remote = engine(*bad, serve(2), path="/generate", timeout=1.5, retries=len(bad))
    samples = list(generate(remote, requests(20, 2)))
    assert len(samples) == 40 and all(map(whole, samples))
    assert {s.log_probs[0] for s in samples} == {-2.0}
    failed = {server.url for server in remote.pool.servers if server.failures}
    assert failed == {server.url for server in bad}


def test_an_answer_is_as_long_as_its_request_lets_it_be(serve: Callable[..., Plain]) -> None:
    """What is parsed holds up every other call: a short question gets no answer of 64 MiB."""
    remote = engine(serve(1, "endless"), retries=0, timeout=30.0)
    with pytest.raises(NoServerError, match=r"answers more than (\d+) bytes") as refused:
        list(generate(remote, requests(1, 1)))
    found = re.search(r"more than (\d+) bytes", str(refused.value))
    assert found is not None and 1 << 20 <= int(found[1]) < 1 << 21
    assert _most_bytes({"max_tokens": 32768, "n": 8}, 1000) == _MAX_BYTES
    assert 1 << 25 <= _most_bytes({"max_tokens": 32768}, 1000) < _MAX_BYTES
    assert _most_bytes({"prompt": "..."}, 1 << 19) == (1 << 20) + (1 << 25)


def test_compressed_answers_are_neither_accepted_nor_unpacked(serve: Callable[..., Plain]) -> None:
    """64 MiB that travel as a few hundred bytes: refused as they come, in no more memory than they take."""
    bomb, plain = serve(1, "gzip"), serve(2)
    remote = engine(bomb, retries=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NoServerError, match="in the encoding 'gzip, gzip', none was accepted"):
        list(generate(remote, requests(1, 1)))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 1 << 25
    pool = ServerPool(plain.url)
    state = pool.submit(pool.send(pool.servers[0], "/state", method="GET")).result()
    assert {name.casefold(): value for name, value in state["headers"].items()}["accept-encoding"] == "identity"


def test_a_server_that_comes_up_late_is_asked_then(serve: Callable[..., Plain]) -> None:
    early = serve(1)
    early.kill()
    remote = engine(early, path="/generate")
    for request in requests(4, 2):
        remote.add(request)
    assert remote.step() == []
    serve(3, "described", port=early.port)
    samples = list(generate(remote, []))
    assert len(samples) == 8 and all(map(whole, samples))


def test_a_server_killed_while_serving_loses_nothing(serve: Callable[..., Plain]) -> None:
    servers = [serve(name, "slow") for name in (1, 2)]
    remote = engine(*servers)
    for request in requests(10, 4, SamplingParams(max_new_tokens=40)):
        remote.add(request)
    time.sleep(0.4)
    servers[0].kill()
    samples = list(generate(remote, []))
    assert len(samples) == 40
    assert all(s.finish == "length" and len(s.tokens) == 40 for s in samples)
    assert {s.log_probs[0] for s in samples[-10:]} == {-2.0}


def test_what_is_refused_or_fails_everywhere_is_given_up_in_plain_sight(
    serve: Callable[..., Plain], caplog: pytest.LogCaptureFixture
) -> None:
    remote = engine(serve(1))
    samples = {s.id: s for s in generate(remote, [Request("bad", [13], PARAMS), *requests(2, 2)])}
    assert (samples["bad"].finish, samples["bad"].tokens) == ("abort", [])
    assert all(whole(s) for name, s in samples.items() if name != "bad")
    assert "sample 'bad' failed" in caplog.text and "13 is forbidden here" in caplog.text
    rows = {"id": ["a", "b"], "response": ["", "yes"], "finish": ["abort", "stop"], "response_tokens": [[], [1]]}
    scored = verl.Reward(lambda texts: [1.0 for _ in texts]).get_reward(verl.Batch.from_columns(rows))
    assert scored["reward"] == [None, 1.0]
    assert "ended by abort" in scored["abstain_reason"][0]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("mode", ["dead", "hang", "nonsense"])
def test_when_no_server_answers_the_run_ends_in_time(
    serve: Callable[..., Plain], make_model: Callable[..., PreTrainedModel], mode: str
) -> None:
    servers = [serve(name, "good" if mode == "dead" else mode) for name in (1, 2)]
    # Without the model's vocabulary, one piece of the nonsense (token 10^9) would be an answer.
    remote = engine(*servers, timeout=1.0, retries=2, model=make_model("llama"))
    if mode == "dead":
        for server in servers:
            server.kill()
    start = time.monotonic()
    with pytest.raises(NoServerError, match="no rollout server works any more"):
        list(generate(remote, requests(3, 2)))
    assert time.monotonic() - start < 30
    assert remote.unfinished == 0
    # Started again, they answer what is asked again.
    for server in servers:
        server.kill()
        serve(3, port=server.port)
    assert all(map(whole, generate(remote, requests(3, 2))))


def test_a_prompt_that_no_server_bears_ends_nothing_but_itself(serve: Callable[..., Plain]) -> None:
    remote = engine(serve(1, "slow"), retries=1)
    few = requests(8, 4, SamplingParams(max_new_tokens=60))
    samples = {s.id: s for s in generate(remote, [Request("bad", [14], PARAMS), *few])}
    assert samples.pop("bad").finish == "abort"
    assert [len(s.tokens) for s in samples.values()] == [60] * 32


def test_when_everything_is_given_up_the_run_ends(serve: Callable[..., Plain]) -> None:
    remote = engine(serve(1))
    with pytest.raises(RolloutError, match=r"64 requests in a row failed.*13 is forbidden here"):
        list(generate(remote, [Request(f"{i}", [13], PARAMS) for i in range(100)]))
    assert remote.unfinished == 0
    assert all(map(whole, generate(remote, requests(3, 2))))


@pytest.mark.parametrize("path", ["/proxy/v1", "/proxy/v1/completions"])
def test_what_stands_before_the_protocols_path_is_kept(serve: Callable[..., Plain], path: str) -> None:
    remote = engine(serve(1, "proxied"), path=path)
    assert all(map(whole, generate(remote, requests(3, 2))))


def test_abort_and_double_ids(serve: Callable[..., Plain]) -> None:
    remote = engine(serve(1, "slow"))
    for request in requests(1, 3, SamplingParams(max_new_tokens=50)):
        remote.add(request)
    with pytest.raises(RolloutError, match="ids must differ"):
        remote.add(requests(1, 1)[0])
    remote.abort(["0/1", "nobody"])
    samples = {s.id: s for s in generate(remote, [])}
    assert {name: s.finish for name, s in samples.items()} == {"0/0": "length", "0/1": "abort", "0/2": "length"}
    assert samples["0/1"].tokens == []


def test_weights_go_to_every_server_and_one_without_them_is_not_used(
    serve: Callable[..., Plain], make_model: Callable[..., PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    good, forgetful = serve(1), serve(2, "forgetful")
    remote = engine(good, forgetful, model=model)
    remote.load_shards(model_shards(model), 7)
    assert f"{forgetful.url} did not take the weights" in caplog.text
    assert "it serves the weights of versions {None}, not 7" in caplog.text
    samples = list(generate(remote, requests(4, 4)))
    assert {(s.log_probs[0], s.policy_version) for s in samples} == {(-1.0, 7)}
    # One that is restarted gets them again.
    good.kill()
    serve(3, port=good.port)
    remote.wake()
    assert {(s.log_probs[0], s.policy_version) for s in generate(remote, requests(4, 4))} == {(-3.0, 7)}
    remote.load_shards(model_shards(model), 8)
    assert {s.log_probs[0] for s in generate(remote, requests(4, 4))} == {-3.0}
    fixed = engine(serve(4, "fixed"), model=model)
    with pytest.raises(NoServerError, match="worker-extension-cls"):
        fixed.load_shards(model_shards(model), 1)


def test_a_server_whose_log_probs_are_of_another_temperature_is_refused_there(
    serve: Callable[..., Plain], make_model: Callable[..., PreTrainedModel]
) -> None:
    """vLLM's model runner V2 has another sampler, that the worker cannot have scale the logits."""
    model = make_model("llama")
    remote = engine(serve(1, "V2"), model=model)
    remote.load_shards(model_shards(model), 1)
    with pytest.raises(RolloutError, match=r"no log-probs at temperature 0\.7.*VLLM_USE_V2_MODEL_RUNNER=0"):
        remote.add(Request("a", [5], SamplingParams(max_new_tokens=2, temperature=0.7)))
    remote.add(Request("b", [5], SamplingParams(max_new_tokens=2)))
    assert [sample.id for sample in generate(remote, [])] == ["b"]


@pytest.mark.quick("between two rollouts")
@pytest.mark.parametrize("when", ["between two rollouts", "while it serves"])
def test_a_server_that_was_restarted_gets_the_weights_and_goes_on(
    serve: Callable[..., Plain], make_model: Callable[..., PreTrainedModel], when: str
) -> None:
    model = make_model("llama")
    first, second = serve(1), serve(2, "slow")
    remote = engine(first, second, model=model)
    remote.load_shards(model_shards(model), 5)
    if when == "while it serves":
        for request in requests(8, 2, SamplingParams(max_new_tokens=40)):
            remote.add(request)
    first.kill()
    restarted = serve(3, port=first.port)
    if when == "while it serves":
        assert len(list(generate(remote, []))) == 16
    else:
        remote.wake()
    names: set[float] = set()
    deadline = time.monotonic() + 120
    while -3.0 not in names and time.monotonic() < deadline:  # a server that failed is left alone for some seconds
        samples = list(generate(remote, requests(12, 2)))
        assert all(map(whole, samples))
        names |= {s.log_probs[0] for s in samples}
    assert names == {-2.0, -3.0}
    state = httpx.get(f"{restarted.url}/state").json()
    assert (state["version"], state["taken"]) == (5, 1)


def test_a_server_that_only_fails_is_named_at_once(serve: Callable[..., Plain]) -> None:
    """Errors of a server that answers nothing else are not the requests' fault: no sample is lost to them."""
    bad = serve(1, "error")
    start = time.monotonic()
    with pytest.raises(NoServerError, match=f"no rollout server works any more \\({bad.url}.*500.*out of order"):
        list(generate(engine(bad, retries=2), requests(3, 2)))
    assert time.monotonic() - start < 20


def test_a_server_that_hangs_costs_twice_the_timeout_at_most(serve: Callable[..., Plain]) -> None:
    remote = engine(serve(1, "hang"), timeout=1.0, retries=50)
    start = time.monotonic()
    with pytest.raises(NoServerError, match="TimeoutError"):
        list(generate(remote, requests(1, 1)))
    assert time.monotonic() - start < 15


class Hanging(RemoteEngine):
    """An engine whose loop runs, and never answers."""

    deadline = 0.2

    def __init__(self) -> None:
        super().__init__(None, eos_token_ids=[0], seed=0)
        self.loop = asyncio.new_event_loop()
        self.cancelled = threading.Event()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _score(self, prompt: list[int], response: list[int]) -> list[float]:
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()
        return []

    async def _update(self, update: dict[str, Any], weights: list[Shard]) -> None:
        await asyncio.sleep(60)


def test_scores_and_weights_are_waited_for_up_to_a_deadline() -> None:
    engine = Hanging()
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"did not score a response within 0\.2 s"):
        engine.score([1], [2])
    assert engine.cancelled.wait(5)
    with pytest.raises(RolloutError, match=r"did not take the weights within 0\.2 s"):
        engine.load_shards([Shard("w", (1,), (0,), torch.zeros(1))], 1)
    assert time.monotonic() - began < 5 and engine.policy_version == 0
    engine.loop.call_soon_threadsafe(engine.loop.stop)


def test_addresses_are_checked() -> None:
    for urls in ([], "host:8000", ["http://a/x", "http://b/y"]):
        with pytest.raises(ConfigError, match="http://host:8000"):
            ServerPool(urls)
    with pytest.raises(ConfigError, match=r"\.\.\./v1 or \.\.\./generate, not '/proxy'"):
        ServerEngine(ServerPool("http://a/proxy"), eos_token_ids=(), seed=0)


def test_what_cannot_be_sent_is_refused(serve: Callable[..., Plain]) -> None:
    with pytest.raises(RolloutError, match="'x' has a grammar"):
        engine(serve(1)).add(Request("x", [20, 30], PARAMS, grammar=Grammar.regex("a")))
    with pytest.raises(RolloutError, match="log-probs of other tokens: use the engine embedded or hf"):
        engine(serve(1)).add(Request("x", [20, 30], PARAMS, top_log_probs=1))
