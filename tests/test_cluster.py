"""How a run comes to a Ray cluster: one of its own that nobody else can use, or one that wants a token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.sockets import LOOPBACK, family, listeners
from verl._host import ray_session as cluster
from verl.errors import ClusterError, ConfigError
from verl.roles.reward_pool import RewardPool

NEVER = "127.0.0.1:1"
JOIN = "from verl._host.ray_session import connect\nconnect()"


class Head(grpc.GenericRpcHandler):
    """Answers as the head of a Ray cluster does: with one token, or with any if that is empty."""

    def __init__(self, token: str) -> None:
        self.token = token

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        is_known = not self.token or ("authorization", f"Bearer {self.token}") in call.invocation_metadata

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if not is_known:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Addresses of two heads, by the token that they want; this user's token is "mine", in a file."""
    (tmp_path / "token").write_text("mine\n")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    servers, addresses = [], {}
    for token in ("mine", "theirs", ""):
        servers.append(grpc.server(futures.ThreadPoolExecutor(1), handlers=[Head(token)]))
        addresses[token] = f"127.0.0.1:{servers[-1].add_insecure_port('127.0.0.1:0')}"
        servers[-1].start()
    yield addresses
    for server in servers:
        server.stop(None)


def test_a_cluster_is_taken_with_its_token_alone(heads: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.check(heads["mine"])
    with pytest.raises(ClusterError, match=r"wants a token, and .*token holds another one: set RAY_AUTH_TOKEN"):
        cluster.check(heads["theirs"])
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    cluster.check(heads["theirs"])
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such/file")
    with pytest.raises(ClusterError, match="there is none here"):
        cluster.check(heads["mine"])


def test_a_cluster_without_authentication_is_refused_unless_the_user_says_so(
    heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match="has no authentication: everyone who reaches it can run code"):
        cluster.check(heads[""])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster.check(heads[""])
    with pytest.raises(ClusterError, match="RAY_AUTH_MODE=disabled keeps Ray from sending it"):
        cluster.check(heads["mine"])


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o604])
def test_a_token_that_others_can_read_is_refused(heads: dict[str, str], tmp_path: Path, mode: int) -> None:
    (tmp_path / "token").chmod(mode)
    with pytest.raises(ClusterError, match=rf"token can be read or changed by others \(mode {mode:o}\).*chmod 600"):
        cluster.check(heads["mine"])


def test_the_token_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / ".ray" / "auth_token"
    before = os.umask(0)
    try:
        cluster._make_token()
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    made = file.read_text()
    assert len(made) == 64
    cluster._make_token()
    assert file.read_text() == made and [*file.parent.iterdir()] == [file]
    file.chmod(0o644)
    with pytest.raises(ClusterError, match="can be read or changed by others"):
        cluster._make_token()


@pytest.mark.parametrize(
    "make", [lambda f: RewardPool(f, "r", workers=1000), lambda f: RewardPool(f, "r", workers=1, max_workers=1000)]
)
def test_more_workers_than_a_machine_bears_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"1000 reward workers are more than this machine of \d+ CPUs bears, at most"):
        make(len)
    pool = RewardPool(len, "r", workers=1)
    with pytest.raises(ConfigError, match="1000 reward workers are more"):
        pool.scale(1000)
    assert pool.size == 0
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    make(len)


def test_no_answer_is_said_at_once() -> None:
    with pytest.raises(ClusterError, match=rf"no Ray cluster answers at {NEVER} \(UNAVAILABLE\)"):
        cluster.check(NEVER)


def test_its_own_cluster_listens_on_loopback_alone_and_wants_the_token() -> None:
    ray = cluster.connect()
    assert cluster.is_own()
    listening = listeners(family(os.getpid()))
    assert listening and listening <= LOOPBACK
    address = ray.get_runtime_context().gcs_address
    env = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_TOKEN": "x" * 32, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("RAY_AUTH_MODE", None)
    done = subprocess.run([sys.executable, "-c", JOIN], env=env, capture_output=True, text=True, timeout=60)
    assert "wants a token, and RAY_AUTH_TOKEN is another one" in done.stderr, done.stderr[-2000:]


def test_workers_of_its_own_cluster_have_the_priority_of_any_other_process() -> None:
    """Ray gives them less, and beside two busy programs they stood still on two processors."""
    ray = cluster.connect()
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)
