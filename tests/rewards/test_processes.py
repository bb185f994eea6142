"""Functions as rewards in a process of their own: what holds the interpreter, hangs or ends it abstains."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests import forked
from tests.rewards.test_failures import WHOLE_BATCH, alive, limit_of
from verl.batch import Batch
from verl.errors import ConfigError
from verl.rewards.calls import ThreadCaller
from verl.rewards.functions import FunctionReward
from verl.rewards.source import run_reward
from verl.roles.reward import Reward
from verl.weights import shards

pytestmark = pytest.mark.reward_processes


def texts(*responses: str) -> Batch:
    return Batch.from_rows([{"prompt": "p", "response": response} for response in responses])


def spends_forever_on_a_regex(solution_str: str) -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))) if solution_str == "bad" else 1.0


def spends_forever_on_a_power(solution_str: str) -> float:
    return float(7**10**10 > 0) if solution_str == "bad" else 1.0


async def spends_forever_on_an_event_loop(solution_str: str) -> float:
    return spends_forever_on_a_regex(solution_str)


def ends_its_process(solution_str: str) -> float:
    if solution_str == "bad":
        os._exit(0)
    return 1.0


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (spends_forever_on_a_regex, "no answer within 0.5 s"),
        (spends_forever_on_a_power, "no answer within 0.5 s"),
        (spends_forever_on_an_event_loop, "no answer within 0.5 s"),
        (ends_its_process, "its process died"),
    ],
)
def test_what_holds_the_interpreter_abstains(function: Any, reason: str) -> None:
    reward, start = Reward(function, timeout=0.5 if "0.5 s" in reason else 10.0), time.monotonic()
    for rows in (texts("good"), texts("bad"), texts("good", "good")):
        result = run_reward(reward.source, rows)
        assert result.reward == [None if row == "bad" else 1.0 for row in rows["response"]]
    assert time.monotonic() - start < 10
    assert reason in str(run_reward(reward.source, texts("bad")).reasons[0])
    reward.close()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", [name for name in WHOLE_BATCH if name not in ("spins", "blocks its loop")])
def test_a_bad_call_abstains_for_its_samples(name: str) -> None:
    function, reason = WHOLE_BATCH[name]
    reward = Reward(function, timeout=limit_of(reason))
    result = run_reward(reward.source, texts("a", "b", "c"))
    assert result.reward == [None] * 3
    assert all(re.search(reason, str(text)) for text in result.reasons)
    reward.close()


def test_one_process_a_function_keeps_its_state_and_no_other_objects(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "verl")
    seen: list[str] = []
    lock = threading.Lock()

    def counts(responses: list[str]) -> list[dict[str, float]]:
        with lock:
            seen.extend(responses)
        return [{"score": float(len(seen)), "pid": float(os.getpid())} for _ in responses]

    reward = Reward(counts)
    results = [run_reward(reward.source, texts("a", "b")) for _ in range(3)]
    assert [result.reward for result in results] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]
    (pid,) = {value for result in results for value in result.components["pid"]}
    assert pid != os.getpid() and seen == []
    assert [record.getMessage().count("is not seen here") for record in caplog.records] == [1]
    reward.close()
    here = Reward(counts, process=False)
    assert run_reward(here.source, texts("a")).components["pid"] == [os.getpid()] and seen == ["a"]


def test_a_process_that_dies_between_two_calls_costs_one_call_and_no_deadline() -> None:
    def who(responses: list[str]) -> list[float]:
        return [float(os.getpid())] * len(responses)

    reward, start = Reward(who, timeout=60.0), time.monotonic()
    (pid,) = run_reward(reward.source, texts("a")).reward
    assert pid is not None
    os.kill(int(pid), signal.SIGKILL)
    result = run_reward(reward.source, texts("a"))
    assert result.reward == [None] and "its process died" in str(result.reasons[0])
    assert run_reward(reward.source, texts("a")).reward[0] not in (None, pid)
    assert time.monotonic() - start < 30
    reward.close()


def test_async_calls_are_under_way_together_and_a_late_one_is_ended_alone() -> None:
    async def waits(solution_str: str) -> float:
        await asyncio.sleep(30 if solution_str == "late" else 0.3)
        return 1.0

    reward, start = Reward(waits, timeout=2.0), time.monotonic()
    result = run_reward(reward.source, texts(*["a", "late", "b"] * 5))
    assert result.reward == [1.0, None, 1.0] * 5
    assert run_reward(reward.source, texts("a")).counts == {}  # the process is the same
    assert time.monotonic() - start < 6
    reward.close()


def test_what_reaches_a_model_or_a_tensor_stays() -> None:
    weight, layer = torch.ones(2), torch.nn.Linear(2, 2)

    class Scored:
        def __init__(self) -> None:
            self.layers = [layer]

        def __call__(self, responses: list[str]) -> list[float]:
            return [1.0] * len(responses)

    functions = [lambda responses: [float(weight[0])] * len(responses), Scored()]
    for function in functions:
        assert isinstance(FunctionReward(function).group, ThreadCaller)
    with pytest.raises(ConfigError, match="process: must be true or false, not 'no'"):
        Reward(spends_forever_on_a_power, process="no")


SCRIPT = """
import os, sys, time
import verl
def f(texts):
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(60 if texts == ["wait"] else 0)
    return [1.0] * len(texts)
print(verl.Reward(f).get_reward([sys.argv[2]])["reward"], flush=True)
os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize("how", [pytest.param(0, marks=pytest.mark.slow), int(signal.SIGKILL)])
def test_the_process_ends_with_the_script(tmp_path: Path, how: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pid"), "go", str(how)]
    done = forked.run(command, timeout=100)
    assert done.stdout == "[1.0]\n" and done.returncode == -how, done.stderr
    pid, end = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if not alive(pid):
                break
        except FileNotFoundError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it lives on")


class Owner:
    """Has the reward of its own method."""

    def __init__(self, process: bool) -> None:
        self.scored = 1.0
        self.reward = FunctionReward(self.score, process=process)
        self.later = FunctionReward(self.score_later, process=process)

    def score(self, texts: list[str]) -> list[float]:
        return [self.scored] * len(texts)

    async def score_later(self, texts: list[str]) -> list[float]:
        return self.score(texts)


@pytest.mark.parametrize("process", [True, False])
def test_the_object_of_a_method_is_freed_and_what_called_it_ends(process: bool) -> None:
    owner = Owner(process)
    for reward in (owner.reward, owner.later):
        assert run_reward(reward, texts("a", "b")).reward == [1.0, 1.0]
    pids = [reward.group._process.pid for reward in (owner.reward, owner.later) if process]  # type: ignore[attr-defined]

    def is_called() -> bool:
        return any(map(alive, pids)) or any(thread.name == "reward score" for thread in threading.enumerate())

    freed = weakref.ref(owner)
    del owner, reward
    gc.collect()
    assert freed() is None
    until = time.monotonic() + 30
    while time.monotonic() < until and is_called():
        time.sleep(0.01)
    assert not is_called()


HELPER = """
import functools, io
import numpy as np
import torch

TABLE = torch.arange(1 << 19, dtype=torch.float32)
HELD = {"list": [TABLE * 2]}
VIEW = (TABLE * 3).numpy()
SPARSE = torch.eye(1024).to_sparse()
class Net:
    layer = torch.nn.Linear(1024, 1024).requires_grad_(False)
class Deep:
    def __init__(self, depth): self.inner = Deep(depth - 1) if depth else TABLE
@functools.lru_cache
def cached(): return TABLE * 4
cached()
def stream():
    table = TABLE * 5
    while True: yield table
STREAM = stream()
next(STREAM)
DEEP = Deep(6)
def default(n, table=TABLE * 6): return float(table[n])
"""
SHAPES = {
    "tensor of a module": "float(helper.TABLE[n])",
    "class attribute": "float(helper.Net.layer(torch.ones(1024)).sum())",
    "list in a dict": "float(helper.HELD['list'][0][n])",
    "lru_cache": "float(helper.cached()[n])",
    "numpy view": "float(helper.VIEW[n])",
    "sparse": "float(helper.SPARSE.to_dense()[n, n])",
    "memory-mapped": "float(mapped[n])",
    "deep": "float(helper.DEEP.inner.inner.inner.inner.inner.inner.inner[n])",
    "generator": "float(next(helper.STREAM)[n])",
    "default argument": "helper.default(n)",
    "closure": "float(hidden()[n])",
    "tokenizer": "float(len(tokenizer.encode('a' * n)))",
    "product on all threads": "float((helper.TABLE.view(512, -1) @ helper.TABLE.view(-1, 512))[n, n])",
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that reaches large tensors of its own in all ways that users have."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "helper_of_rewards.py").write_text(HELPER)
    values = torch.arange(1 << 19, dtype=torch.float32)
    torch.save(values, folder / "values.pt")
    (folder / "mine.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import torch, helper_of_rewards as helper\n"
        "from tests.conftest import byte_tokenizer\n"
        "tokenizer = byte_tokenizer()\n"
        "class Mapped:\n"
        f"    values = torch.load({str(folder / 'values.pt')!r}, mmap=True, weights_only=True)\n"
        "    def __getitem__(self, n): return self.values[n]\n"
        "mapped = [Mapped()][0]\n"
        "def hide():\n    table = torch.arange(1 << 19) * 7.0\n    return lambda: table\n"
        "hidden = hide()\n"
        "def scores(texts):\n"
        "    n = len(texts[0])\n"
        f"    return [{', '.join(SHAPES.values())}]\n"
    )
    return folder / "mine.py"


@pytest.mark.parametrize("process", [True, False])
def test_tensors_and_models_of_the_users_are_whole_in_the_process(shapes: Path, process: bool, tiny: Path) -> None:
    from verl._host.user_functions import load_function

    here = load_function(f"{shapes}:scores")
    module = here.__module__
    trainer = verl.Trainer(verl.Actor(str(tiny)), reward=here, log_dir=False)

    def every(texts: list[str]) -> list[float]:
        scores: list[float] = sys.modules[module].scores(texts)
        return scores

    reward = Reward(every, process=process, timeout=60.0)
    assert isinstance(reward.source.group, ThreadCaller) is not process  # type: ignore[attr-defined]
    rows = ["abc"] * len(SHAPES)
    assert reward.get_reward(rows)["reward"] == pytest.approx(here(rows))
    reward.close(), trainer.close()


def test_a_fork_gives_back_what_the_trainer_made_and_nothing_else(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LARGE", 0)
    users = [torch.ones(1000)]
    actor = verl.Actor(str(tiny), dtype="bfloat16")
    trainer = verl.Trainer(actor, reward=lambda texts: [float(len(text)) for text in texts], log_dir=False, n=2)
    trainer.step(["a", "b"])
    made = [weakref.ref(tensor) for owner, tensors in shards.no_forks.items() for tensor in tensors(owner)]

    def sizes(refs: list[Any]) -> list[int]:
        return [one().untyped_storage().nbytes() for one in refs]

    def kept(texts: list[str]) -> list[float]:
        return [float(sum(sizes(made))), float(sum(sizes([lambda: users[0]])))]

    before = sizes(made)
    monkeypatch.setattr("verl.rewards.functions.can_travel", lambda function: True)
    reward = Reward(kept)
    assert reward.get_reward(["a", "b"])["reward"] == [0.0, 4000.0]
    assert sizes(made) == before and min(before) > 0 and len(made) > 20
    reward.close(), trainer.close()


@pytest.mark.parametrize("says", ["Cannot re-initialize CUDA in forked subprocess", "CUDA error: initialization error"])
def test_what_needs_an_accelerator_goes_on_in_this_process(says: str, caplog: pytest.LogCaptureFixture) -> None:
    here = os.getpid()

    def needs(texts: list[str]) -> list[float]:
        if os.getpid() != here:
            raise RuntimeError(says)
        return [1.0] * len(texts)

    reward = Reward(needs)
    for _ in range(2):
        assert reward.get_reward(["a", "b"])["reward"] == [1.0, 1.0]
    assert isinstance(reward.source.group, ThreadCaller)  # type: ignore[attr-defined]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("reward needs uses an accelerator, which a forked process cannot")
