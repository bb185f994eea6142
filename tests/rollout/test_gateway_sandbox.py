"""Commands in the sandbox: the gateway is all of the network that they reach, and of the files they read their own."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_gateway_server import Run
from tests.sockets import listeners
from tests.templates import TOOL_FAMILIES
from verl.errors import ConfigError, SandboxError
from verl.rollout.gateway import gateway
from verl.rollout.gateway.gateway import Gateway

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux namespaces")
ASK = """
import json, os, socket, sys, time, urllib.request
row = json.loads(sys.stdin.readline())

def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.loads(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20).read())

def fault(attempt):
    try:
        attempt()
        return "none"
    except OSError as error:
        return type(error).__name__
"""
LOOK = """
seen = {
    "another port": fault(lambda: socket.create_connection(("127.0.0.1", row["port"]), 2)),
    "another host": fault(lambda: socket.create_connection(("192.0.2.1", 80), 2)),
    "another family": fault(lambda: socket.socket(socket.AF_INET6)),
    "files": [path for path in row["secrets"] if os.path.exists(path)],
    "readable": open(row["readable"]).read(),
    "own file": fault(lambda: open(__file__, "a")) != "none",
    "user": os.getuid() == 0,
    "variables": sorted(os.environ.keys() - {"LC_CTYPE"}),
}
answer = ask(json.dumps(seen))["choices"][0]["message"]["content"]
open("/tmp/mine", "w").write(answer)
print(json.dumps({"reward": float(len(open("/tmp/mine").read()))}))
"""


def play(folder: Path, end: str, turns: Any = ("Hi.<|im_end|>",), **options: Any) -> Run:
    (folder / "agent.py").write_text(ASK + end)
    return Run([sys.executable, str(folder / "agent.py")], turns, sandbox=True, **options)


def test_a_command_reaches_the_gateway_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, readable = tmp_path / "secret", tmp_path / "data" / "table.txt"
    readable.parent.mkdir()
    secret.write_text("42")
    readable.write_text("of mine")
    monkeypatch.setenv("SECRET", "42")
    before = listeners([os.getpid()])
    with socket.create_server(("127.0.0.1", 0)) as other:
        secrets = [str(secret), "/etc/passwd", "/proc/self/environ", "/sys", str(Path(__file__).resolve())]
        row = {"port": other.getsockname()[1], "secrets": secrets, "readable": str(readable)}
        run = play(tmp_path, LOOK, row=row, environment={"MORE": "7"}, readable=[readable.parent])
    (call,) = run.record.calls
    assert json.loads(call.prompt.messages[0].content) == {
        "another port": "ConnectionRefusedError",
        "another host": "OSError",
        "another family": "PermissionError",
        "files": [],
        "readable": "of mine",
        "own file": True,  # it cannot be written
        "user": False,
        "variables": sorted((
            "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "HOME", "LANG", "MORE", "OPENAI_API_KEY", "OPENAI_BASE_URL",
            "PATH",
        )),
    }  # fmt: skip
    assert run.outcome.responses[0].reward == 3.0 and not run.record.excluded
    assert listeners([os.getpid()]) == before


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("ask('x')\nraise ValueError('no such tool')", "status 1: ValueError: no such tool"),
        ("ask('x')\nos.kill(os.getpid(), 9)", "twice: the agent was killed by signal 9"),
    ],
)
def test_how_a_command_ends(tmp_path: Path, end: str, error: str) -> None:
    run = play(tmp_path, end, ["Hi.<|im_end|>"] * 2)
    assert error in str(run.outcome.error)


def running(word: str) -> int:
    """Processes that have this word in their command."""
    count = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            count += word.encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return count


def test_a_command_that_never_ends_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    seconds, counts = f"{600 + os.getpid() / 1e7:.7f}", list[int]()
    started = "import subprocess\nfor _ in range(3):\n    subprocess.Popen(['sleep', row['seconds']])\ntime.sleep(600)"

    def watch() -> None:
        until = time.monotonic() + 2
        while running(seconds) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        counts.append(running(seconds))

    watching = threading.Thread(target=watch)
    watching.start()
    run = play(tmp_path, started, row={"seconds": seconds}, deadline=2.0)
    assert "twice: the agent took longer than 2 s" in str(run.outcome.error)
    watching.join()
    end = time.monotonic() + 5
    while running(seconds) and time.monotonic() < end:
        time.sleep(0.02)
    assert counts == [3] and running(seconds) == 0


def test_a_command_of_the_system(tmp_path: Path) -> None:
    """A shell, by its name, whose text is no file."""
    run = Run("sh -c 'read row; echo $OPENAI_BASE_URL >&2; exit 3'", sandbox=True)
    assert "status 3: http://127.0.0.1:" in str(run.outcome.error)


def test_what_no_sandbox_can_run_is_refused(tmp_path: Path) -> None:
    for agent in (lambda base_url, api_key, row: 1.0, "http://127.0.0.1:9000/run"):
        with pytest.raises(ConfigError, match="sandbox=True is for a command"):
            Gateway(agent, sandbox=True)
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        Gateway("no-such-program --now", sandbox=True)
    with pytest.raises(ConfigError, match=r"readable: .*gone does not exist"):
        Gateway("sh", sandbox=True, readable=[tmp_path / "gone"])


def test_the_first_line_says_what_is_contained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = TOOL_FAMILIES["qwen2.5"].make()
    with caplog.at_level(logging.INFO, "verl"):
        Gateway("sh").check_tokenizer(tokenizer)
        assert "nothing contains what the agent executes" in caplog.records[0].message
        caplog.clear()
        Gateway("sh", sandbox=True, readable=["/etc"]).check_tokenizer(tokenizer)
    assert "the agent runs in the sandbox: no network but the gateway, and of your files only /etc" in caplog.text
    assert "nothing contains" not in caplog.text

    def refuse() -> None:
        raise SandboxError("new namespaces: not permitted")

    monkeypatch.setattr(gateway, "require", refuse)
    with pytest.raises(SandboxError, match="not permitted"):  # there is no weaker mode
        Gateway("sh", sandbox=True).check_tokenizer(tokenizer)
