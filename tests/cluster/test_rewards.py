"""Reward workers: what hangs, dies or raises is scored elsewhere or abstains; workers come and go; nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

import verl
from tests.cluster.functions import length, pids, who
from tests.conftest import byte_tokenizer
from verl.batch import Batch
from verl.cluster.ray import pool
from verl.dataflow.loop import dump_stacks
from verl.errors import ConfigError, RewardError
from verl.rewards.functions import FunctionReward
from verl.roles import reward_pool as rewards
from verl.roles.reward import Reward
from verl.roles.reward_pool import RewardPool


def texts_of(*texts: str) -> Batch:
    return Batch.from_rows([{"prompt": "p", "response": text} for text in texts])


@pytest.fixture
def make() -> Iterator[Callable[..., Reward]]:
    made: list[Reward] = []

    def reward(function: Any = length, **options: Any) -> Reward:
        made.append(Reward(function, **{"workers": 2, "timeout": 30.0, **options}))
        return made[-1]

    yield reward
    for one in made:
        one.close()


def test_samples_are_scored_one_by_one_and_in_order(make: Callable[..., Reward]) -> None:
    reward = make()
    assert not reward.source.whole_batch
    texts = ["a" * n for n in range(1, 40)]
    assert reward.get_reward(texts_of(*texts))["reward"] == [float(n) for n in range(1, 40)]
    # The first may score all of them before the second has started.
    wait_until(lambda: len(pids(reward.group)) == 2, 60)
    assert make(lambda texts: [float(len(texts))] * len(texts), batch_size=2).get_reward(texts_of("a", "b", "c"))[
        "reward"
    ] == [2.0, 2.0, 1.0]


@pytest.mark.slow
def test_what_raises_hangs_or_dies_is_tried_elsewhere_and_counted(make: Callable[..., Reward], tmp_path: Path) -> None:
    once = [tmp_path / trouble for trouble in ("raise", "hang", "die")]
    for file in once:
        file.write_text(file.name)
    samples = texts_of("good", *map(str, once), "raise", "hang", "die", "good")
    reward = make(timeout=1.0, retries=1)
    found, metrics = asyncio.run(reward.score_and_count(samples))
    assert found["reward"] == [4.0, *(float(len(str(file))) for file in once), None, None, None, 4.0]
    said = found["abstain_reason"]
    assert "ValueError: no" in said[4] and "no answer within 1 s" in said[5]
    assert "reward worker" in said[6] and os.uname().nodename in said[6] and "died" in said[6]
    assert metrics["failures/count"] == 3 and metrics["late/count"] == 3 and metrics["retries/count"] == 5
    assert (
        metrics["deaths/count"] >= 1 + 3 + 3
    )  # a death is tried once more than `retries` says, a late call is a death
    default = make(timeout=1.0, default_reward=-1.0).get_reward(texts_of("good", "raise", "die"))
    assert default["reward"] == [4.0, -1.0, -1.0]


def test_workers_that_are_killed_at_any_moment_lose_nothing(make: Callable[..., Reward]) -> None:
    reward = make(retries=1)
    chance, over = random.Random(0), threading.Event()
    reward.get_reward(texts_of("a"))

    def kill() -> None:
        nonlocal kills
        killed = 0
        while not over.wait(0.3 + 0.4 * chance.random()):
            if all(worker.is_ready for worker in reward.group.workers):
                killed = 0
            if killed < pool.MAX_DEATHS - 1:  # so many before they are ready would mean that the function cannot start
                killed += 1
                with suppress(ProcessLookupError, IndexError):  # dead already, or none has started
                    os.kill(chance.choice(pids(reward.group)), signal.SIGKILL)
                    kills += 1

    kills = 0
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = reward.get_reward(texts_of(*["wait0.02"] * 150))
    finally:
        over.set()
        killer.join()
    assert found["reward"] == [8.0] * 150
    assert reward.group.size == 2 and kills >= 2


@pytest.mark.slow
def test_workers_come_and_go_while_samples_are_scored(make: Callable[..., Reward]) -> None:
    reward = make(who, workers=1)
    served: list[set[float]] = []

    def score(samples: int) -> None:
        served.append(set(reward.get_reward(texts_of(*["wait0.02"] * samples))["reward"]))

    score(3)
    group, first = reward.group, set(pids(reward.group))
    scorer = threading.Thread(target=score, args=(400,))
    scorer.start()
    group.scale(3)
    while sum(worker.is_ready for worker in group.workers) < 3 and scorer.is_alive():
        time.sleep(0.05)
    time.sleep(0.5)
    group.scale(1)
    scorer.join()
    assert len(served[1]) == 3 and None not in served[1]
    score(3)
    assert served[2] == served[0] == {float(pid) for pid in first}  # the first one has never stopped
    with pytest.raises(ConfigError, match="size: must be at least 1"):
        group.scale(0)


def test_a_queue_brings_workers_and_idleness_takes_them(
    make: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 0.5)
    reward = make(workers=1, max_workers=3)
    reward.group.backlog = 0.2
    reward.get_reward(texts_of(*["wait0.05"] * 2))
    assert reward.group.size == 1
    reward.get_reward(texts_of(*["wait0.05"] * 100))
    assert reward.group.size == 3
    end = time.monotonic() + 20
    while reward.group.size > 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert reward.group.size == 1
    assert reward.get_reward(texts_of("abc"))["reward"] == [3.0]


@pytest.fixture
def dies_first(tmp_path: Path) -> Callable[[int], str]:
    """A reward in a file that ends the process which imports it, so many times."""

    def make(times: int) -> str:
        file, starts = tmp_path / "frail.py", tmp_path / "starts"
        file.write_text(
            "import os\n"
            f"with open({str(starts)!r}, 'a+') as starts:\n"
            "    starts.write('start\\n')\n"
            "    starts.flush()\n"
            "    starts.seek(0)\n"
            "    if os.getpid() != "
            f"{os.getpid()} and len(starts.readlines()) <= {times} + 1:\n"  # this process imports it, too
            "        os._exit(5)\n"
            "def f(solution_str): return float(len(solution_str))\n"
        )
        return f"{file}:f"

    return make


@pytest.mark.slow
def test_a_worker_that_dies_while_it_starts_is_replaced_twice(
    make: Callable[..., Reward], dies_first: Callable[[int], str]
) -> None:
    assert make(dies_first(2), workers=1).get_reward(texts_of("abc"))["reward"] == [3.0]


def test_a_third_death_while_it_starts_ends_the_run(
    make: Callable[..., Reward], dies_first: Callable[[int], str]
) -> None:
    with pytest.raises(verl.errors.ClusterError, match=r"reward 'f': reward worker 2 .* died .*, as 2 did before it"):
        make(dies_first(3), workers=1).get_reward(texts_of("a"))


@pytest.mark.slow
def test_workers_that_die_together_are_one_death(
    make: Callable[..., Reward], dies_first: Callable[[int], str], tmp_path: Path
) -> None:
    assert make(dies_first(3), workers=3).get_reward(texts_of("abc"))["reward"] == [3.0]
    assert len((tmp_path / "starts").read_text().split()) > 1 + 3


def outcome(reward: Reward, *texts: str) -> Any:
    try:
        return reward.get_reward(texts_of(*texts))["reward"]
    except Exception as error:
        return error


def test_whatever_ends_the_supervisor_is_told_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RewardPool(length, "length", workers=1)
    monkeypatch.setattr(group, "fit", lambda *args: {}["lost"])
    reward = Reward(FunctionReward(length, workers=lambda function, name: group))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(outcome(reward, "a")), daemon=True)
    waiting.start()
    waiting.join(60)
    assert isinstance(found[0], verl.errors.ClusterError)
    assert str(found[0]) == "reward 'length': its workers cannot be kept: KeyError: 'lost'"
    monkeypatch.undo()
    assert outcome(reward, "abc") == [3.0]  # the next sample starts workers
    group.close()


@pytest.mark.slow
def test_functions_of_a_script_travel_by_value(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import verl\n"
        "bonus = 2.0\n"
        "def f(texts):\n    return [len(t) + bonus for t in texts]\n"
        "reward = verl.Reward(f, workers=1)\n"
        "print(reward.get_reward(verl.Batch.from_rows([{'response': 'abc'}]))['reward'])\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[5.0]", done.stderr
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
        Reward(lambda texts: [float(lock.locked())], workers=1)


def test_a_stall_dumps_every_worker(make: Callable[..., Reward], capfd: pytest.CaptureFixture[str],
                                    caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    reward = make()
    waiting = threading.Thread(target=lambda: reward.get_reward(texts_of("wait3", "wait3")))
    waiting.start()
    while sum(len(worker.jobs) for worker in reward.group.workers) < 2:
        time.sleep(0.05)
    time.sleep(0.5)
    with caplog.at_level(logging.ERROR):
        dump_stacks("somebody waits")
    waiting.join()
    said: list[str] = []

    def stacks() -> int:
        said.append(capfd.readouterr().err)
        return "".join(said).count("in length\n")

    wait_until(lambda: stacks() == 2, 20)  # Ray brings them
    for worker in (0, 1):
        assert f"reward worker {worker} (pid " in caplog.text and os.uname().nodename in caplog.text


@pytest.mark.slow
def test_close_ends_them_and_the_next_sample_starts_them(make: Callable[..., Reward]) -> None:
    reward = make()
    reward.get_reward(texts_of("a"))
    at_first = pids(reward.group)
    errors: list[Exception] = []

    def score() -> None:
        try:
            reward.get_reward(texts_of("hang"))
        except RewardError as error:
            errors.append(error)

    waiting = threading.Thread(target=score)
    waiting.start()
    time.sleep(0.3)
    reward.close()
    waiting.join(10)
    assert "was closed" in str(errors[0])
    assert reward.get_reward(texts_of("a"))["reward"] == [1.0] and not set(at_first) & set(pids(reward.group))


@pytest.mark.slow
def test_a_file_that_is_edited_ends_the_run_where_it_would_be_read_again(
    make: Callable[..., Reward], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(solution_str): return 1.0\n")
    reward = make(f"{file}:f", workers=1)
    assert reward.get_reward(texts_of("a"))["reward"] == [1.0]
    file.write_text("def f(solution_str): return 2.0\n")
    assert reward.get_reward(texts_of("a"))["reward"] == [1.0]
    os.kill(pids(reward.group)[0], signal.SIGKILL)
    with pytest.raises(RewardError, match=rf"{file} is not what it was when this run began"):
        reward.get_reward(texts_of("a"))
    assert make(f"{file}:f", workers=1).get_reward(texts_of("a"))["reward"] == [2.0]
    file.write_text("def f(solution_str): return 1.0\n")
    assert reward.get_reward(texts_of("a"))["reward"] == [1.0]


@pytest.mark.slow
def test_what_a_function_started_does_not_outlive_a_driver_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(
        "import subprocess\n"
        "def f(solution_str):\n"
        "    command = 'sleep 600 & echo $! > ' + solution_str + '; wait'\n"  # a child of a child
        "    subprocess.Popen(['sh', '-c', command]).wait()\n"
    )
    script, told = "import sys, verl\nverl.Reward(sys.argv[1], workers=1, timeout=600).get_reward", tmp_path / "told"
    script += "(verl.Batch.from_rows([{'response': sys.argv[2]}]))"
    driver = subprocess.Popen([sys.executable, "-c", script, f"{tmp_path / 'child.py'}:f", str(told)])
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"), 240)
    finally:
        driver.kill()
        driver.wait()
    child = Path("/proc", told.read_text().strip(), "cmdline")
    try:
        wait_until(lambda: not child.exists() or not child.read_bytes(), 20)  # nothing: dead, and nobody's yet
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(told.read_text()), signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def classifier() -> Any:
    """A live reward model, with its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, num_labels=1, pad_token_id=0, **sizes)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float64).eval(), byte_tokenizer()


@pytest.mark.slow
def test_reward_models_are_scaled_replaced_and_score_as_one_in_this_process(
    make: Callable[..., Reward], tmp_path: Path
) -> None:
    model, tokenizer = classifier()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    samples = texts_of(*("word " * n for n in range(1, 40)))
    expected = Reward(model=model, tokenizer=tokenizer, batch_size=4).get_reward(samples)["reward"]
    for source, options in ((model, {"tokenizer": tokenizer}), (str(tmp_path), {})):
        reward = make(None, model=source, workers=1, batch_size=4, retries=1, **options)
        assert reward.get_reward(samples)["reward"] == pytest.approx(expected, abs=1e-9)
        reward.group.scale(2)
        os.kill(pids(reward.group)[0], signal.SIGKILL)
        found, counts = asyncio.run(reward.score_and_count(samples))
        assert found["reward"] == pytest.approx(expected, abs=1e-9)
        assert counts["workers/max"] == 2 and counts["deaths/count"] == 1


@pytest.mark.slow
def test_a_reward_model_that_cannot_be_made_ends_the_run(make: Callable[..., Reward], tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)reward worker 0 .* failed:.*ModelError.*no such model"):
        make(None, model=str(tmp_path / "no such model"), workers=1).get_reward(texts_of("a"))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no range"):
        Reward(length, workers=4, max_workers=2)
    with pytest.raises(ConfigError, match="may grow to"):
        Reward(length, max_workers=2)
    with pytest.raises(ConfigError, match="give it workers=N"):
        _ = Reward(length).group
    with pytest.raises(ConfigError, match="not to one of its parts"):
        Reward({"a": {"source": length, "workers": 2}})
    for options in ({}, {"template": "{response}"}):
        with pytest.raises(ConfigError, match="Reward: its calls wait for servers, up to 64 at a time: leave workers"):
            Reward(url="http://127.0.0.1:1", workers=2, **options)
    assert rewards.RewardPool(length, "length", workers=1).size == 0  # they start when they are needed
