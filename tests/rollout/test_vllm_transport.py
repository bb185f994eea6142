"""How weights reach processes of vLLM's. Without a GPU the memory of a device is torch's shared memory, whose handles
are numbers and bytes, too; vLLM's own workers open it in `test_vllm.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import forked
from verl.rollout.vllm import transport as vllm_transport
from verl.rollout.vllm.transport import (
    Transport,
    device_checksum,
    in_device_memory,
    in_file,
    received,
    transport_for,
)
from verl.weights.shard import Shard, checksum, split_large
from verl.weights.shards import model_shards

#: Reads a message, and prints the checksum of the shards that it stands for.
READER = """
import json, sys
from verl.rollout.vllm.transport import received
from verl.weights.shard import checksum
message, rank = json.loads(sys.stdin.read()), int(sys.argv[1])
print(checksum(received(message, rank, "cpu")))
"""


@pytest.fixture
def shards(make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """Of three dtypes, with cut weights, one that is not contiguous, and a number."""
    monkeypatch.setattr("verl.weights.shard.BUNCH", 3000)
    halves = [Shard.whole(f"half.{i}", torch.randn(3, 5 + i).bfloat16()) for i in range(3)]
    strange = [Shard.whole("turned", torch.randn(4, 7).t()), Shard.whole("number", torch.tensor(3.0).double())]
    return [*split_large(model_shards(make_model("llama", torch.float32))), *halves, *strange]


@pytest.mark.parametrize(
    "transport", [in_file, partial(in_device_memory, device="cpu", ranks=2)], ids=["file", "device"]
)
def test_another_process_reads_what_was_lent(shards: list[Shard], transport: Transport) -> None:
    assert any(not shard.is_whole for shard in shards)
    with transport(shards) as message:
        text = json.dumps(message)
        for rank in ("0", "1"):
            done = forked.run([sys.executable, "-c", READER, rank], input=text)
            assert done.stdout.strip() == checksum(shards), done.stderr
    with pytest.raises((ValueError, RuntimeError)):  # it is lent until then
        received(json.loads(text), 0, "cpu")


def test_what_was_received_is_the_workers_own(shards: list[Shard]) -> None:
    """vLLM may keep pieces until a layer is whole, after the sender has used its memory again."""
    with in_device_memory(shards, "cpu", 1) as message:
        found = received(message, 0, "cpu")
        handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in message["handles"][0]]
        opened = vllm_transport.MEMORIES["cpu"].open(*handle)
        torch.empty(0, dtype=torch.uint8).set_(opened).zero_()
        with pytest.raises(ValueError, match="not those that were sent"):
            received(message, 0, "cpu")
    assert checksum(found) == checksum(shards)


def test_a_handle_is_for_one_reader(shards: list[Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = iter([(b"first", 1), (b"second", 2)])
    opened: list[tuple[Any, ...]] = []
    memory = vllm_transport.Memory(lambda storage: next(shared), lambda *handle: opened.append(handle))  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_transport, "MEMORIES", {"cpu": memory})
    with in_device_memory(shards, "cpu", 2) as message:
        for rank in (1, 0):
            with pytest.raises(AttributeError):  # there is no storage here
                received(message, rank, "cpu")
    assert opened == [(b"second", 2), (b"first", 1)]
    with pytest.raises(ValueError, match="cannot open memory of 'xpu', only of cpu"):
        received({**message, "memory": "xpu"}, 0, "cpu")


def test_every_damage_of_a_buffer_is_seen() -> None:
    buffer = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    found = device_checksum(buffer)
    assert device_checksum(buffer.clone()) == found
    for byte in range(0, 4096, 64):
        other = buffer.clone()
        other[byte] ^= 1
        assert device_checksum(other) != found
    words = buffer.view(torch.int64).clone()
    words[[3, 9]] = words[[9, 3]]
    assert device_checksum(words.view(torch.uint8)) != found


def test_a_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have other numbers in the worker's process."""
    seen, opened = ["GPU-a", "GPU-b"], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=seen[index]))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *handle: opened.append(handle), raising=False)
    storage: Any = SimpleNamespace(_share_cuda_=lambda: (1, b"handle", 64, 0, b"counter", 0, b"event", True))
    handle = vllm_transport.MEMORIES["cuda"].share(storage)
    seen.reverse()
    vllm_transport.MEMORIES["cuda"].open(*handle)
    assert opened == [(0, b"handle", 64, 0, b"counter", 0, b"event", True)]
    seen.remove("GPU-b")
    with pytest.raises(ValueError, match=r"on device GPU-b, which this worker does not see, only \['GPU-a'\]"):
        vllm_transport.MEMORIES["cuda"].open(*handle)


@pytest.mark.parametrize(
    ("trainer", "engine", "way"),
    [
        ("cuda:1", "cuda:1", in_device_memory),
        ("cpu", "cuda", in_file),
        ("cpu", "cpu", in_file),
    ],
)
def test_weights_of_a_gpu_stay_on_it(trainer: str, engine: str, way: Callable[..., Any]) -> None:
    transport = transport_for(trainer, engine, 2)
    assert transport is way or (isinstance(transport, partial) and transport.func is way)
    assert not isinstance(transport, partial) or transport.keywords == {"device": trainer, "ranks": 2}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        received({"slices": [], "path": str(tmp_path / "none"), "checksum": ""}, 0, "cpu")
