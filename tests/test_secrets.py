"""Credentials reach the servers that they are for, and nothing that a run writes, logs or prints."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.trainer.runs import run_dir, settings
from verl._base.secrets import key_of, masked, masked_settings
from verl._host.http_servers import ServerPool
from verl._host.log import setup_logging
from verl.batch import Batch
from verl.cli.main import app
from verl.config import build_config, config_hash, load_config
from verl.errors import ConfigError, TrainingError
from verl.rollout.gateway.agents import AgentError, agent_of
from verl.run.train import train

PASSWORD, TOKEN, KEY = "pa55-of-the-judge", "t0ken-of-the-judge", "k3y-of-the-judge"
SECRETS = (PASSWORD, TOKEN, KEY)


class Service(ThreadingHTTPServer):
    """Scores by the length of the response; a response that begins with a vowel gets an error that repeats what was
    sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        sent, authorization = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), ""
        authorization = self.headers.get("Authorization", "")
        self.server.seen.append((self.path, authorization))  # type: ignore[attr-defined]
        answer, status = json.dumps([float(len(text)) for text in sent["responses"]]), 200
        if any(text[:1] < "a" for text in sent["responses"]):
            plain = base64.b64decode(authorization.partition("Basic ")[2]).decode()
            answer, status = f"refused: {self.path} {authorization} {plain}", 401
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.shutdown()


def leaked(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def written(folder: Path) -> dict[str, list[str]]:
    """Files that have a secret in them, compressed columns too."""
    found = {}
    for file in (file for file in folder.rglob("*") if file.is_file()):
        text = file.read_bytes().decode("latin-1")
        if file.suffix == ".parquet":
            text += repr(list(Batch.from_parquet(file).rows()))
        if names := leaked(text):
            found[str(file)] = names
    return found


def test_a_run_shows_no_credential_of_an_address(
    tmp_path: Path, tiny: Path, service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    address = f"http://judge:{PASSWORD}@{service.host}/score?token={TOKEN}&version=2"
    reward = {"reward.path": None, "reward.url": [address], "reward.retries": 0, "reward.max_failure_rate": 1.0}
    short = {"trainer.total_steps": 1, "trainer.eval_every": None, "data.eval": None}
    config = build_config(settings(tmp_path, tiny, **reward, **short))
    with suppress(TrainingError):  # where all samples were refused
        train(config)
    basic = base64.b64encode(f"judge:{PASSWORD}".encode()).decode()
    assert {*service.seen} == {(f"/score?token={TOKEN}&version=2", f"Basic {basic}")}
    run = run_dir(tmp_path)
    out = capfd.readouterr()
    assert written(run) == {} and not leaked(out.out + out.err)
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert kept["reward"]["url"] == [f"http://***@{service.host}/score?token=***&version=***"]
    other = build_config(
        settings(tmp_path, tiny, **{**reward, "reward.url": [address.replace(PASSWORD, "new")]}, **short)
    )
    assert config_hash(config) == config_hash(other), "a run goes on with another password"


def test_an_address_names_variables(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_PASSWORD", PASSWORD)
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def sent(user: str, **options: Any) -> tuple[str, str]:
        pool = ServerPool(f"http://{user}{service.host}/score?key=$JUDGE_KEY", **options)
        pool.submit(pool.ask({pool.path: {"responses": ["aa"]}}, list)).result(10)
        return service.seen[-1]

    basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    path = f"/score?key={KEY}"
    assert sent("me:$JUDGE_PASSWORD@") == (path, f"Basic {basic}")
    assert sent("$JUDGE_KEY@") == (path, f"Bearer {KEY}")
    assert sent("", api_key="$JUDGE_KEY") == (path, f"Bearer {KEY}")
    with pytest.raises(ConfigError, match="in the variable NO_SUCH of the environment, which is not set"):
        sent("me:$NO_SUCH@")
    # Names are no secrets: a run's settings can be run again.
    assert masked("http://me:$JUDGE_PASSWORD@h/x?key=$KEY") == "http://me:$JUDGE_PASSWORD@h/x?key=$KEY"
    assert masked("http://$JUDGE_KEY@h") == "http://$JUDGE_KEY@h"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://a:b@h:1/x?t=1#f, then", "at http://***@h:1/x?t=***#f, then"),
        ("['https://u@h', \"ftp://u:p@h/y\"]", "['https://***@h', \"ftp://***@h/y\"]"),
        ("http://h:1/v1 and me@example.org?a=b", "http://h:1/v1 and me@example.org?a=b"),
        ("agent --api-key abc --token=def --max-tokens 5", "agent --api-key *** --token=*** --max-tokens 5"),
        ("['agent', '--judge-api-key', 'abc']", "['agent', '--judge-api-key', '***']"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer ***"),
    ],
)
def test_what_is_masked_by_its_place(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_settings_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {
        "api_key": KEY, "metric_key": "reward", "max_tokens": 5, "token": TOKEN, "judge_password": PASSWORD,
        "inner": [{"Authorization": f"Basic {KEY}", "secret": "$NAME"}],
    }  # fmt: skip
    assert masked_settings(content) == {
        "api_key": "***", "metric_key": "reward", "max_tokens": 5, "token": "***", "judge_password": "***",
        "inner": [{"Authorization": "***", "secret": "$NAME"}],
    }  # fmt: skip
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh-of-wandb")
    monkeypatch.setenv("PLAIN_TEXT", "plain-text-of-others")
    assert masked("no key abcdefgh-of-wandb, plain-text-of-others") == "no key ***, plain-text-of-others"
    before = masked_settings({"path": "abcdefgh-of-wandb"})
    assert before == {"path": "abcdefgh-of-wandb"}, "what a run is called does not depend on the environment"


def test_log_lines_of_every_part_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_of(KEY, "test")
    setup_logging(tmp_path / "run.log")
    try:
        logging.getLogger("verl.any").warning("at %s with %s", f"http://a:{PASSWORD}@h?token={TOKEN}", KEY)
    finally:
        setup_logging()
    assert not leaked((tmp_path / "run.log").read_text() + capsys.readouterr().err)
    record = logging.LogRecord("httpx", logging.INFO, "", 0, "POST %s", (f"http://h?token={TOKEN}",), None)
    assert logging.getLogger("httpx").filter(record) and not leaked(record.getMessage())


def test_the_dry_run_and_refusals_show_none(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n')
    words = [
        "train", f"actor_rollout_ref.model.path={tiny}", f"data.train={tmp_path}/t.jsonl", "algorithm.name=grpo",
        f"reward.url=['http://a:{PASSWORD}@h/x?token={TOKEN}']", "--dry-run",
    ]  # fmt: skip
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "http://***@h/x?token=***" in shown.output and not leaked(shown.output)
    with pytest.raises(ConfigError, match="total_step") as raised:
        load_config(None, [f"reward.url=['http://a:{PASSWORD}@h']", f"trainer.total_step=http://a:{PASSWORD}@h"])
    assert not leaked(str(raised.value))


def test_an_agents_command_shows_no_variable_of_its_own() -> None:
    program = "import os, sys; sys.exit('no access with ' + os.environ['SHOP_API_KEY'])"
    agent = agent_of([sys.executable, "-c", program], {"SHOP_API_KEY": KEY}, None, 60.0)
    with pytest.raises(AgentError, match=r"status 1: no access with \*\*\*"):
        asyncio.run(agent("http://127.0.0.1:1/v1", "key", {"prompt": "a"}))
