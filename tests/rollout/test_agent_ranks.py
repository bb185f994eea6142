"""Agents behind the gateway in whole runs: on several ranks as in one process, and after a SIGKILL in the middle of an
episode as without."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.cluster.test_torchrun import assert_equal_runs
from tests.trainer.runs import assert_same_run, rows, run_dir, run_process, settings

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("rank_agent.py")
AGENT = '''
import os
import signal
import threading

import verl
from tests.rollout.rank_agent import agent, reward

lock = threading.Lock()


def killed(base_url, api_key, row):
    """Between its calls the process dies without a word when KILL_FILE's number of episodes is over."""

    def count():
        with lock:
            left = int(open(os.environ["KILL_FILE"]).read())
            open(os.environ["KILL_FILE"], "w").write(str(left - 1))
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return agent(base_url, api_key, row, between=count)


gateway = verl.Gateway(killed, chat_template="hermes")
'''


@pytest.fixture(scope="module")
def alone(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and what one process made of it."""
    model, out = make_tiny("gpt2", torch.float64), tmp_path_factory.mktemp("alone")
    ranks.alone(SCRIPT, model, out)
    return model, out


@pytest.mark.parametrize("train", [{}, {"strategy": "fsdp"}], ids=["ddp", "fsdp"])
def test_two_ranks_equal_one_process(alone: tuple[Path, Path], tmp_path: Path, train: dict[str, str]) -> None:
    model, expected = alone
    ranks.job(2, SCRIPT, model, tmp_path, json.dumps(train))
    assert_equal_runs(expected, tmp_path)


def test_a_run_that_was_killed_in_the_middle_of_an_episode_is_as_one_that_was_not(tmp_path: Path, tiny: Path) -> None:
    """The step's episodes are run again, whole."""
    for name, left in (("a", 1_000_000), ("b", 41)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "agent.py").write_text(AGENT)
        options = {
            "actor_rollout_ref.rollout.episode": f"{folder / 'agent.py'}:gateway",
            "actor_rollout_ref.rollout.batch_invariant": True,  # when a call arrives decides nothing
            "reward.path": f"{folder / 'agent.py'}:reward",
            "trainer.total_steps": 4,
            "trainer.eval_every": None,
        }
        configuration, calls = settings(folder, tiny, **options), folder / "calls"
        calls.write_text(str(left))
        process = run_process(folder, configuration, KILL_FILE=str(calls))
        output, _ = process.communicate(timeout=200)
        if name == "b":
            # Twelve episodes a step, a checkpoint every two: this was in the fourth.
            assert process.returncode == -signal.SIGKILL, output[-3000:]
            assert [row["step"] for row in rows(run_dir(folder))][-1] in (2, 3)
            calls.write_text("1000000")
            process = run_process(folder, configuration, KILL_FILE=str(calls))
            output, _ = process.communicate(timeout=200)
            assert "going on from step" in output
        assert process.returncode == 0, output[-3000:]
    assert_same_run(run_dir(tmp_path / "a"), run_dir(tmp_path / "b"))
