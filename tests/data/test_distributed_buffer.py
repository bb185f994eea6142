"""The buffer that a Ray cluster shares, under the contract of all buffers."""

from __future__ import annotations

from typing import Any

import pytest

from verl._host.ray_session import connect
from verl.batch import Batch
from verl.data.buffers import Buffer, make_buffer
from verl.errors import ConfigError, DataError

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> None:
    connect()


def samples(start: int, count: int) -> Batch:
    return Batch.from_rows([{"id": str(i), "response_tokens": [i] * (i % 4)} for i in range(start, start + count)])


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity: must be at least 1"):
        make_buffer("distributed", 0)


@pytest.mark.slow
def test_the_contract_of_buffers(cluster: None) -> None:
    buffer = make_buffer("distributed", 10, "contract")
    assert isinstance(buffer, Buffer)
    buffer.add(samples(0, 3))
    buffer.add(samples(3, 4))
    assert (len(buffer), buffer.room) == (7, 3)
    with pytest.raises(DataError, match="7 of 10 places are taken"):
        buffer.add(samples(7, 4))
    assert buffer.drain() == samples(0, 7)
    buffer.add(samples(7, 2))
    state = Batch.from_ipc(buffer.state().to_ipc())
    assert buffer.drain()["id"] == ["7", "8"]
    assert len(buffer.drain()) == len(buffer) == 0
    buffer.load_state(state)
    buffer.add(samples(9, 1))
    assert buffer.drain()["id"] == ["7", "8", "9"]
    buffer.load_state(samples(0, 0))
    assert len(buffer) == 0


@pytest.mark.slow
def test_processes_share_it_and_what_a_dead_one_added_stays(cluster: None) -> None:
    @ray.remote(num_cpus=0.001)
    class Producer:
        def add(self, start: int) -> int:
            from verl.data.buffers import make_buffer

            buffer: Any = make_buffer("distributed", 999, "shared")
            buffer.add(Batch.from_rows([{"id": str(i)} for i in range(start, start + 5)]))
            return int(buffer.capacity)

    buffer = make_buffer("distributed", 100, "shared")
    producers = [Producer.remote(), Producer.remote()]
    capacities = ray.get([p.add.remote(10 * i) for i, p in enumerate(producers)], timeout=120)
    assert capacities == [100, 100]
    for producer in producers:
        ray.kill(producer)
    assert sorted(buffer.drain()["id"], key=int) == [str(i) for i in (*range(5), *range(10, 15))]
