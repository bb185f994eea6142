"""Ranks that wait for others say for whom, soon, and end by name."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl._host.ranks import rank_here, torchrun_ranks
from verl.cluster.torchrun import meeting
from verl.cluster.torchrun.meeting import meet
from verl.errors import ClusterError, ConfigError


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(meeting, "PATIENCE", 0.3)
    return number


@pytest.mark.parametrize(("ranks", "away"), [([0], "1, 2, 3"), ([1], "0"), ([0, 2], "1, 3"), ([3, 1, 2], "0")])
def test_those_that_are_away_are_named_soon_and_at_the_deadline(
    port: int, ranks: list[int], away: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor() as threads:
        ends = [threads.submit(meet, rank, 4, 1.0) for rank in ranks]
        for rank, end in zip(ranks, ends, strict=True):
            with pytest.raises(
                ClusterError, match=rf"rank {rank} of 4 waited 1 s at .*:{port} for rank {away}, in vain"
            ):
                end.result()
    assert time.monotonic() - begun < 6
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(ranks)
    assert all(re.match(rf"rank \d of 4 waits at 127\.0\.0\.1:{port} for rank {away}: start", text) for text in told)


def test_those_that_come_late_meet(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, 1, 3, 30.0)
        time.sleep(0.5)
        second = threads.submit(meet, 0, 3, 30.0)
        time.sleep(0.5)
        stores = [first, second, threads.submit(meet, 2, 3, 30.0)]
        stores[0].result().set("said", "by 1")
        assert all(store.result().get("said") == b"by 1" for store in stores)
    assert {record.getMessage().split(": ")[0][-6:] for record in caplog.records} <= {"rank 0", "rank 2"}


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ClusterError, match=f"rank 0 of 2 cannot listen at 127.0.0.1:{port}"):
            meet(0, 2, 2.0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 are set, but 'MASTER_ADDR'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "'x' is not a place to meet"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x', which is no number"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE='-1', which is no number"),
    ],
)
def test_left_over_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        meet(rank_here(), torchrun_ranks(), 1.0)


def test_a_rank_without_a_world_is_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert rank_here() == 0 and torchrun_ranks() == 1
