"""vLLM's own server and its asynchronous engine, on a tiny model: samples, log-probs, weights over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import verl
from verl.errors import RolloutError
from verl.models.loading import load_model, load_tokenizer
from verl.weights.shards import model_shards

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ["--worker-extension-cls", "verl.rollout.vllm.worker.WorkerExtension", "--weight-transfer-config"]
OPTIONS += ['{"backend": "verl"}', "--enforce-eager", "--block-size", "32", "--dtype", "float32"]
OPTIONS += ["--kv-cache-memory-bytes", str(1 << 24), "--max-num-seqs", "16", "--generation-config", "vllm"]


class Server:
    def __init__(self, model: Path, log: Path, port: int = 0) -> None:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            port = self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--port",
            str(port),
        ]
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *OPTIONS], env=env, stdout=out, stderr=out, start_new_session=True
            )
        end = time.monotonic() + 400
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(log.read_text()[-3000:])
            time.sleep(0.5)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """SIGKILL to all of its processes but Python's resource trackers, which then remove their shared memory."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_tracker = b"resource_tracker" in (folder / "cmdline").read_bytes()
                if os.getpgid(int(folder.name)) == self.process.pid and not is_tracker:
                    os.kill(int(folder.name), signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture(scope="module")
def wide(make_tiny: Callable[..., Path]) -> Path:
    return make_tiny("wide")


@pytest.fixture(scope="module")
def server(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(wide, tmp_path_factory.mktemp("vllm") / "log")
    yield running
    running.kill()


@torch.no_grad()
def gap(model: Any, sequences: verl.Batch, temperature: float = 1.0) -> float:
    worst = 0.0
    for row in sequences.rows():
        prompt, tokens = row["prompt_tokens"], row["response_tokens"]
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float() / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(row["rollout_log_probs"])).abs().max()))
    return worst


@pytest.mark.parametrize("path", ["", "/generate"])
def test_a_running_server_generates(server: Server, wide: Path, path: str) -> None:
    model = load_model(wide)
    worker = verl.vLLMWorker(api_url=server.url + path, tokenizer=str(wide))
    for options in ({}, {"temperature": 0.0}, {"stop": ("a", "e", "i")}):
        sequences = worker.generate_sequences(["Once upon", "In the"], n=2, max_new_tokens=12, **options)
        assert set(sequences["finish"]) <= {"stop", "length"}
        assert gap(model, sequences) < 1e-3
    again = worker.generate_sequences(["Once upon"], n=2, key="k", max_new_tokens=12)
    assert (
        worker.generate_sequences(["Once upon"], n=2, key="k", max_new_tokens=12)["response_tokens"]
        == again["response_tokens"]
    )


@pytest.mark.parametrize("path", ["", "/generate"])
def test_a_running_server_judges(server: Server, wide: Path, path: str) -> None:
    """What it says is the greedy answer of its model to the template; what is made of it is the reward."""
    model, tokenizer = load_model(wide), load_tokenizer(wide)
    rows = {"id": ["a", "b"], "prompt": ["Why?"] * 2, "response": ["yes", "no"], "response_tokens": [[1], [1]]}
    batch = verl.Batch.from_columns(rows)
    options: dict[str, Any] = {"template": "Grade {prompt} {response}", "max_tokens": 12}
    said: list[str] = []

    def parse(text: str) -> float:
        said.append(text.replace("\ufffd", ""))
        return float(len(text))

    scored = verl.Reward(verl.vLLMWorker(server.url + path, parse=parse, **options)).get_reward(batch)
    expected = []
    for response in rows["response"]:
        chat = [{"role": "user", "content": f"Grade Why? {response}"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(answer, skip_special_tokens=True).replace("\ufffd", ""))
    assert sorted(said) == sorted(expected)
    assert None not in scored["reward"]
    unparsed = verl.vLLMWorker(server.url + path, **options).get_reward(batch)
    assert unparsed["reward"] == [None, None]
    assert "gave no score" in unparsed["abstain_reason"][0]


def test_a_trainer_gives_the_server_its_weights_over_http(server: Server, wide: Path) -> None:
    actor = verl.Actor(str(wide), rollout=verl.vLLMWorker(api_url=server.url), optim={"lr": 1e-2})
    trainer = verl.Trainer(
        actor, reward_fn=lambda texts: [float(len(set(text))) for text in texts], n=4,
        sampling=verl.SamplingParams(max_new_tokens=10, temperature=0.8), log_dir=False,
    )  # fmt: skip
    for _ in range(3):
        record = trainer.step(["Once upon a time", "In the beginning"])
        assert record["sync/mismatch/max"] < 1e-3
        assert record["mismatch/log_ratio/max"] < 1e-3
    # The version it serves is ours; a server that is set back behind our back is seen before it is used.
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == "3"
    httpx.post(f"{server.url}/collective_rpc", json={"method": "reset_weights"}).raise_for_status()
    worker = actor.group.worker
    with pytest.raises(RolloutError, match="other weights than the trainer"):
        worker._sync.measure(worker.rollout_engine, worker.engine)


def test_an_update_that_is_damaged_on_the_way_leaves_the_old_weights(
    server: Server, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(wide)
    engine = verl.vLLMWorker(api_url=server.url, tokenizer=str(wide)).engine(model, (0,), 0)
    engine.load_shards(model_shards(model), 20)
    monkeypatch.setattr("verl.rollout.vllm.transport.checksum", lambda shards: "0")
    with pytest.raises(RolloutError, match="no rollout server took the weights of version 21"):
        engine.load_shards(model_shards(model), 21)
    answer = httpx.post(f"{server.url}/collective_rpc", json={"method": "verl_served"}).json()
    assert answer["results"] == [{"version": 20}]
    monkeypatch.undo()
    engine.load_shards(model_shards(model), 22)


def test_an_asynchronous_engine_of_the_callers(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    arguments = AsyncEngineArgs(
        model=str(wide), dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=16,
        kv_cache_memory_bytes=1 << 24, worker_extension_cls="verl.rollout.vllm.worker.WorkerExtension",
        weight_transfer_config={"backend": "verl"}, generation_config="vllm",
    )  # fmt: skip
    engine = AsyncLLMEngine.from_engine_args(arguments)
    try:
        tokenizer = load_tokenizer(wide)
        assert verl.vLLMAdapter(engine, tokenizer).tokenizer is tokenizer
        adapter = verl.vLLMAdapter(engine)  # the engine has one
        model = load_model(wide)
        sequences = adapter.generate_sequences(["Once upon a time"], n=3, max_new_tokens=10)
        assert gap(model, sequences) < 1e-3
        actor = verl.Actor(str(wide), rollout=verl.vLLMAdapter(engine, loop=adapter._own[0]._loop), optim={"lr": 1e-2})
        for _ in range(2):
            sequences = actor.generate_sequences(["Once upon a time"], n=4, max_new_tokens=10)
            assert gap(actor.model, sequences) < 1e-3
            record = actor.update(sequences, [1.0, 0.0, 0.0, 1.0])
            assert record["sync/mismatch/max"] < 1e-3
        # In asynchronous code of the caller's, which keeps its tokenizer.
        again = verl.vLLMAdapter(engine, tokenizer, loop=adapter._own[0]._loop)
        two = asyncio.run(again.generate_async(["Once upon a time"], n=2, max_new_tokens=5))
        assert set(two["finish"]) <= {"stop", "length"} and len(two) == 2
        monkeypatch.setattr(engine, "finish_weight_update", None)
        with pytest.raises(RolloutError, match="did not take the weights of version 3"):
            actor.update(sequences, [1.0, 0.0, 0.0, 1.0])
        with pytest.raises(RolloutError, match="not used again: it may have taken a part"):
            actor.generate_sequences(["Once upon a time"], n=4, max_new_tokens=10)
    finally:
        engine.shutdown()


def test_an_engine_on_the_callers_event_loop(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    arguments = AsyncEngineArgs(
        model=str(wide), dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=16,
        kv_cache_memory_bytes=1 << 24, generation_config="vllm",
    )  # fmt: skip

    async def main() -> verl.Batch:
        engine = AsyncLLMEngine.from_engine_args(arguments)
        try:
            adapter = verl.vLLMAdapter(engine)
            with pytest.raises(RolloutError, match="await generate_async"):
                adapter.generate_sequences(["Once"], max_new_tokens=4)
            return await adapter.generate_async(["Once upon a time"], n=2, max_new_tokens=10)
        finally:
            engine.shutdown()

    assert gap(load_model(wide), asyncio.run(main())) < 1e-3


def test_a_restarted_server_gets_the_weights_and_goes_on(wide: Path, tmp_path: Path) -> None:
    running = Server(wide, tmp_path / "log")
    actor = verl.Actor(str(wide), rollout=verl.vLLMWorker(api_url=running.url), optim={"lr": 1e-2})
    try:
        sequences = actor.generate_sequences(["Once upon a time"], n=4, max_new_tokens=10)
        actor.update(sequences, [1.0, 0.0, 0.0, 1.0])
        running.kill()
        running = Server(wide, tmp_path / "log", port=running.port)
        sequences = actor.generate_sequences(["Once upon a time"], n=4, max_new_tokens=10)
        assert gap(actor.model, sequences) < 1e-3 and set(sequences["policy_version"]) == {1}
    finally:
        running.kill()


def test_a_killed_server_ends_the_run_in_time(wide: Path, tmp_path: Path) -> None:
    running = Server(wide, tmp_path / "log")
    worker = verl.vLLMWorker(api_url=running.url, tokenizer=str(wide), timeout=20.0, retries=1)
    assert len(worker.generate_sequences(["Once"], n=2, max_new_tokens=4)) == 2
    running.kill()
    start = time.monotonic()
    with pytest.raises(RolloutError, match="no rollout server works any more"):
        worker.generate_sequences(["Once"], n=2, max_new_tokens=4)
    assert time.monotonic() - start < 60
