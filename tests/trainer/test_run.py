"""Whole runs of `verl train` on a tiny real model: resume after any end, and what is left behind."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests import forked
from tests.trainer.runs import (
    assert_same_run,
    count_lines,
    evals,
    final_state,
    rows,
    run_dir,
    run_process,
    settings,
)
from verl.algorithms import registry
from verl.batch import Batch
from verl.checkpoint.store import load_checkpoint
from verl.checkpoint.verify import verify
from verl.config import build_config
from verl.errors import ConfigError, DataError, RewardError
from verl.run.build import check_settings
from verl.run.train import train

PPO = {"algorithm.name": "ppo", "actor_rollout_ref.rollout.n": 2, "actor_rollout_ref.actor.mini_batch_size": 2}


@pytest.mark.quick("grpo")
@pytest.mark.parametrize("algorithm", [{}, PPO], ids=["grpo", "ppo"])
def test_steps_equal_steps_before_and_after_a_resume(tmp_path: Path, tiny: Path, algorithm: dict[str, Any]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    summary = train(build_config(settings(tmp_path / "a", tiny, **algorithm)))
    train(build_config(settings(tmp_path / "b", tiny, **algorithm, **{"trainer.total_steps": 4})))
    train(build_config(settings(tmp_path / "b", tiny, **algorithm)))
    a, b = run_dir(tmp_path / "a"), run_dir(tmp_path / "b")
    first, second = final_state(a), final_state(b)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    # The shorter run ended with an evaluation of its own; all other rows are the same.
    assert [r for r in rows(a) if "reward" in r] == [r for r in rows(b) if "reward" in r]
    assert summary["eval_problems"] == 6 and summary["headline"] == "reward"
    assert verify(a / "checkpoints" / "latest").ok
    for name in ("report.html", "summary.json", "config.yaml", "completions/step-000000.parquet"):
        assert (a / name).exists(), name


@pytest.mark.slow
def test_files_are_mixed_by_their_weights_and_a_resume_goes_on(tmp_path: Path, tiny: Path) -> None:
    def source(folder: Path) -> dict[str, Any]:
        files = [folder / "few.jsonl", folder / "many.jsonl"]
        for file, count in zip(files, (3, 30), strict=True):
            file.write_text("".join(json.dumps({"prompt": f"{file.stem} {i}"}) + "\n" for i in range(count)))
        return {"data.train": {"path": list(map(str, files)), "weights": [2, 1]}, "data.batch_size": 6}

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    train(build_config(settings(tmp_path / "a", tiny, **source(tmp_path / "a"))))
    train(build_config(settings(tmp_path / "b", tiny, **source(tmp_path / "b"), **{"trainer.total_steps": 4})))
    train(build_config(settings(tmp_path / "b", tiny, **source(tmp_path / "b"))))
    a, b = run_dir(tmp_path / "a"), run_dir(tmp_path / "b")
    first, second = final_state(a), final_state(b)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    seen = [Batch.from_parquet(file) for file in sorted((a / "completions").glob("train-*"))]
    assert len(seen) == 6
    for batch in seen:  # six prompts of four samples, two thirds of them of the file with three rows
        assert [sum(prompt.startswith(name) for prompt in batch["prompt"]) for name in ("few", "many")] == [16, 8]


def test_a_killed_run_goes_on_from_its_last_commit(tmp_path: Path, tiny: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    train(build_config(settings(tmp_path / "a", tiny)))
    calls = tmp_path / "calls"
    # The kill switch is another function, so the run that is compared with has it too, switched off.
    killing = {"reward.path": f"{tmp_path / 'b' / 'reward.py'}:killing", "reward.process": False}
    configuration = settings(tmp_path / "b", tiny, **killing)
    # One call an evaluation and a step: in the last step, after the commit of step 4.
    calls.write_text("7")
    first = run_process(tmp_path, configuration, KILL_FILE=str(calls))
    assert first.wait(timeout=200) == -signal.SIGKILL, first.stdout and first.stdout.read()[-2000:]
    assert (run_dir(tmp_path / "b") / "checkpoints" / "latest").exists()
    calls.write_text("1000000")
    second = run_process(tmp_path, configuration, KILL_FILE=str(calls))
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output[-3000:]
    assert "going on from step" in output
    assert_same_run(run_dir(tmp_path / "a"), run_dir(tmp_path / "b"))
    assert len(list((run_dir(tmp_path / "b") / "logs").glob("*.log"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sigkill_at_random_moments(tmp_path: Path, tiny: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    longer = {"trainer.total_steps": 30, "trainer.save_every": 1, **PPO}
    train(build_config(settings(tmp_path / "a", tiny, **longer)))
    configuration = settings(tmp_path / "b", tiny, **longer)
    metrics, rng = tmp_path / "b" / "runs" / "latest" / "metrics.jsonl", random.Random(0)
    for _ in range(6):
        process = run_process(tmp_path, configuration)
        wanted = count_lines(metrics) + rng.randint(0, 3)
        while process.poll() is None and count_lines(metrics) <= wanted:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.communicate()
    assert load_checkpoint(run_dir(tmp_path / "b") / "checkpoints" / "latest").step > 0
    process = run_process(tmp_path, configuration)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-3000:]
    assert_same_run(run_dir(tmp_path / "a"), run_dir(tmp_path / "b"))


def test_sigterm_saves_and_ends(tmp_path: Path, tiny: Path) -> None:
    configuration = settings(tmp_path, tiny, **{"trainer.total_steps": 100000, "trainer.save_every": 100000})
    process = run_process(tmp_path, configuration)
    deadline = time.monotonic() + 120
    metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"
    while time.monotonic() < deadline and count_lines(metrics) <= 2:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output[-2000:]
    last = json.loads((tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert load_checkpoint(run_dir(tmp_path) / "checkpoints" / "latest").step == last


@pytest.mark.slow
def test_a_finished_run_is_followed_by_a_new_one(tmp_path: Path, tiny: Path) -> None:
    short = {"trainer.total_steps": 1, "trainer.eval_every": None}
    train(build_config(settings(tmp_path, tiny, **short)))
    first = run_dir(tmp_path)
    train(build_config(settings(tmp_path, tiny, **short)))
    assert len(rows(run_dir(tmp_path))) == len(rows(first.with_name(first.name + ".1")))


@pytest.mark.quick("zero_lr")
@pytest.mark.parametrize("control", ["zero_lr", "permute_rewards"])
def test_controls(tmp_path: Path, tiny: Path, control: str) -> None:
    train(build_config(settings(tmp_path, tiny, **{"trainer.control": control, "trainer.total_steps": 2})))
    found = load_checkpoint(run_dir(tmp_path) / "checkpoints" / "latest").tensors("actor/weights")
    from verl.models.loading import load_model
    from verl.weights.shards import model_shards

    start = {shard.name: shard.tensor for shard in model_shards(load_model(str(tiny)))}
    same = all(torch.equal(start[name], found[name]) for name in start)
    assert same == (control == "zero_lr")


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, tiny: Path) -> None:
    train(build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 4})))
    newest = run_dir(tmp_path) / "checkpoints" / "step-000004"
    weights = next(newest.glob("actor/weights-*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    (tmp_path / "b").mkdir()
    train(build_config(settings(tmp_path / "b", tiny)))
    train(build_config(settings(tmp_path, tiny)))
    first, second = final_state(run_dir(tmp_path)), final_state(run_dir(tmp_path / "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_algorithm_of_the_users_own_file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    file = tmp_path / "mine.py"
    file.write_text(
        "import verl\n"
        "print_it = print\n"
        "@verl.register_algorithm('halved')\n"
        "class Halved(verl.BaseAlgorithm):\n"
        "    share: float = 0.5\n"
        "    def compute_loss(self, x):\n"
        "        total = -self.share * (x.weights * x.columns['advantages'] * x.log_probs).sum()\n"
        "        return verl.Loss(total=total, metrics={'own/share': self.share})\n"
    )
    changes = {"data.eval": None, "trainer.eval_every": None, "trainer.total_steps": 1}
    for name in (f"{file}:Halved", "halved"):
        own = {"algorithm.name": name, "algorithm.share": 0.25}
        train(build_config(settings(tmp_path, tiny, **changes, **own)))
        assert rows(run_dir(tmp_path))[0]["own/share"] == 0.25
    for name, words in (("Halve", "did you mean 'Halved'"), ("print_it", "subclass of verl.BaseAlgorithm")):
        with pytest.raises(ConfigError, match=words):
            check_settings(build_config(settings(tmp_path, tiny, **changes, **{"algorithm.name": f"{file}:{name}"})))


@pytest.mark.slow
def test_a_full_disk_stops_neither_training_nor_the_last_checkpoint(tmp_path: Path, tiny: Path) -> None:
    short = {"trainer.total_steps": 2, "trainer.eval_every": None}
    train(build_config(settings(tmp_path, tiny, **short)))
    good = run_dir(tmp_path) / "checkpoints" / "step-000002"
    # From now on no file may grow over some tens of kilobytes: logs fit, weights do not.
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000));"
    limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limit += "from verl.cli.main import app; app(['train', sys.argv[1]])"
    file = tmp_path / "run.yaml"
    longer = {"trainer.total_steps": 5, "trainer.save_every": 1, "trainer.eval_every": None}
    file.write_text(json.dumps(settings(tmp_path, tiny, **longer)))
    command = [sys.executable, "-c", limit, str(file)]
    done = forked.run(command, timeout=200, check=False)
    assert [row["step"] for row in rows(run_dir(tmp_path)) if "reward" in row] == [1, 2, 3, 4, 5]
    assert done.returncode == 1
    assert "trained but not saved" in done.stderr
    assert load_checkpoint(good).step == 2
    train(build_config(settings(tmp_path, tiny, **longer)))
    assert load_checkpoint(run_dir(tmp_path) / "checkpoints" / "latest").step == 5


def test_a_first_evaluation_without_any_score_has_no_gain(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = {"reward.path": f"{tmp_path / 'reward.py'}:late", "reward.max_failure_rate": 1.0}
    summary = train(build_config(settings(tmp_path, tiny, **late, **{"trainer.total_steps": 1})))
    assert summary["reward_before"] is None and summary["reward_after"] >= 0
    assert summary["gain"] is summary["gain_low"] is summary["gain_high"] is None
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if "gain" in line or "before" in line]
    assert [words[-2] for words in shown] == ["-", "-"]
    assert json.loads((run_dir(tmp_path) / "summary.json").read_text())["state"] == "finished"
    assert "reward after training" in (run_dir(tmp_path) / "report.html").read_text()


def test_a_run_of_nothing_but_failures_is_an_error_and_not_taken_for_trained(tmp_path: Path, tiny: Path) -> None:
    short = {"reward.path": f"{tmp_path / 'reward.py'}:broken", "trainer.total_steps": 1, "data.eval": None}
    configuration = build_config(settings(tmp_path, tiny, **short, **{"trainer.eval_every": None}))
    for _ in range(2):
        with pytest.raises(RewardError, match="'broken' failed on every sample"):
            train(configuration)
    assert not (run_dir(tmp_path) / "summary.json").exists()
    assert not list((run_dir(tmp_path) / "checkpoints").iterdir())


@pytest.mark.quick("broken-reward 'broken' failed on every sample")
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("nothing", "reward 'nothing' gave no finite number"),
        ("huge", "reward 'huge' failed on every sample"),
        ("broken", "reward 'broken' failed on every sample"),
        ("high", "no token had a gradient other than 0: reward 'high' gave the samples of a prompt one number"),
    ],
)
def test_a_run_that_learned_nothing_fails_by_name_however_often_it_is_started(
    tmp_path: Path, tiny: Path, reward: str, words: str
) -> None:
    void = {"reward.path": f"{tmp_path / 'reward.py'}:{reward}", "trainer.save_every": 1, "trainer.total_steps": 2}
    configuration = settings(tmp_path, tiny, **void, **{"trainer.eval_every": None})
    for _ in range(2):
        process = run_process(tmp_path, configuration)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 1 and words in output, output[-3000:]
        assert "Traceback" not in output
    assert not (run_dir(tmp_path) / "summary.json").exists()
    logs = [log.read_text() for log in sorted((run_dir(tmp_path) / "logs").glob("*.log"))]
    assert [log.count("Traceback") for log in logs] == [int(reward == "broken")] * 2
    assert reward != "broken" or all(f"{tmp_path / 'reward.py'} line" in text for text in (output, *logs))


HOLDS = """
import os, re
left = 12
def holds(responses, prompts):
    global left
    left -= 1
    if left == 0 and os.path.exists(os.path.join(os.path.dirname(__file__), "bad")):
        re.match(r"(a+)+$", "a" * 60 + "b")
    return [-sum(map(ord, text)) / max(len(text), 1) for text in responses]
"""


@pytest.mark.slow
def test_a_reward_that_holds_the_interpreter_ends_the_run_by_name_and_the_same_command_goes_on(
    tmp_path: Path, tiny: Path
) -> None:
    changes = {
        "reward.path": f"{tmp_path / 'holds.py'}:holds",
        "reward.timeout": 1.0,
        "reward.process": False,
        "trainer.save_every": 1,
    }
    configuration = settings(tmp_path, tiny, **changes, **{"data.eval": None, "trainer.eval_every": None})
    (tmp_path / "holds.py").write_text(HOLDS)
    (tmp_path / "bad").touch()
    began = time.monotonic()
    output, _ = (process := run_process(tmp_path, configuration)).communicate(timeout=200)
    assert process.returncode == -9 and "reward holds at " in output, output[-3000:]
    assert "holds the interpreter beyond its deadline" in output
    assert time.monotonic() - began < 120
    (tmp_path / "bad").unlink()
    output, _ = (process := run_process(tmp_path, configuration)).communicate(timeout=200)
    assert process.returncode == 0 and "going on from step 3" in output, output[-3000:]


@pytest.mark.slow
def test_two_evaluations_of_a_step_are_one_row(tmp_path: Path, tiny: Path) -> None:
    train(build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 0})))
    assert [row["step"] for row in evals(run_dir(tmp_path))] == [0]
    short = {"trainer.total_steps": 1, "trainer.eval_every": None}
    train(build_config(settings(tmp_path, tiny, **short)))
    (run_dir(tmp_path) / "summary.json").unlink()  # as if it had been cut off before
    train(build_config(settings(tmp_path, tiny, **short)))
    assert [row["step"] for row in evals(run_dir(tmp_path))] == [0, 1]


@pytest.mark.slow
def test_an_evaluation_that_is_made_again_is_one_row_of_the_metrics(tmp_path: Path, tiny: Path) -> None:
    for total, evaluated in ((2, [0, 2]), (4, [0, 2, 4])):
        short = {"trainer.total_steps": total, "trainer.eval_every": None}
        train(build_config(settings(tmp_path, tiny, **short)))
        for _ in range(2):
            (run_dir(tmp_path) / "summary.json").unlink()  # as if it had been cut off before
            train(build_config(settings(tmp_path, tiny, **short)))
        assert [row["step"] for row in rows(run_dir(tmp_path)) if "eval/reward" in row] == evaluated
        assert [row["step"] for row in rows(run_dir(tmp_path)) if "reward" in row] == [*range(1, total + 1)]


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_finished(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 2})))
    longer = build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 3}))
    summary = run_dir(tmp_path) / "summary.json"
    assert summary.exists()

    def cut(self: object, prompts: object) -> None:
        raise DataError("cut off")

    monkeypatch.setattr("verl.trainer.trainer.Trainer.advance", cut)
    with pytest.raises(DataError, match="cut off"):
        train(longer)
    assert not summary.exists()
    monkeypatch.undo()
    train(longer)
    assert json.loads(summary.read_text())["steps"] == 3


@pytest.mark.parametrize(("component", "headline"), [("high", "accuracy"), ("signs", "reward")])
def test_a_component_called_accuracy_is_one_if_it_is_a_share(
    tmp_path: Path, tiny: Path, component: str, headline: str
) -> None:
    path = tmp_path / "reward.py"
    parts = {"accuracy": {"path": f"{path}:{component}"}, "form": {"path": f"{path}:low", "weight": 0.5}}
    reward = {"reward.path": None, "reward.components": parts}
    summary = train(build_config(settings(tmp_path, tiny, **reward, **{"trainer.total_steps": 1})))
    assert summary["headline"] == headline and summary["gain"] is not None
    assert [row["headline"] for row in evals(run_dir(tmp_path))] == [headline] * 2
    assert [("low" in row, row["accuracy"]) for row in evals(run_dir(tmp_path))] == (
        [(True, 1.0)] * 2 if headline == "accuracy" else [(False, None)] * 2
    )


@pytest.mark.slow
def test_pairs_that_are_all_right_are_a_share_however_they_are_cut(tmp_path: Path, tiny: Path) -> None:
    pair = {"chosen": "aaaa", "rejected": "zzzz zz"}
    pairs = {
        "algorithm.name": "dpo",
        "reward.path": None,
        "actor_rollout_ref.actor.max_tokens_per_micro_batch": 32,
        "trainer.total_steps": 6,
        "trainer.eval_every": None,
    }
    configuration = settings(tmp_path, tiny, **pairs)
    for name, count in (("train", 9), ("eval", 3)):
        lines = [json.dumps({"prompt": f"{name} {i}: ", **pair}) + "\n" for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    train(build_config(configuration))
    last = evals(run_dir(tmp_path))[-1]
    assert last["pairs/accuracy"] == pytest.approx(1.0) and last["high"] == pytest.approx(1.0)


def test_of_recorded_rows_only_those_that_lost_something_are_told(tmp_path: Path, tiny: Path) -> None:
    changes = {"algorithm.name": "sft", "reward.path": None, "trainer.total_steps": 1, "trainer.eval_every": None}
    configuration = settings(tmp_path, tiny, **changes, **{"data.max_response_length": 5})
    for name, count in (("train", 9), ("eval", 3)):
        lines = [json.dumps({"prompt": f"{name} {i}: ", "completion": "a" * (i + 1)}) + "\n" for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    train(build_config(configuration))
    log = (run_dir(tmp_path) / "logs" / "001.log").read_text().splitlines()
    told = [line.partition("verl.run.train: ")[2] for line in log if "WARNING" in line]
    # Five bytes and the end of sequence are six tokens.
    assert told == ["5 rows of data.train have responses longer than data.max_response_length, which lost their end"]


@pytest.mark.parametrize(
    ("count", "size", "kind", "sizes"), [(7, 4, "grpo", [8, 6]), (3, 8, "grpo", [6]), (7, 4, "dpo", [8, 6])]
)
def test_an_epoch_trains_on_every_row(
    tmp_path: Path, tiny: Path, count: int, size: int, kind: str, sizes: list[int]
) -> None:
    changes: dict[str, Any] = {
        "data.eval": None, "data.batch_size": size, "trainer.total_steps": 100, "trainer.total_epochs": 1,
        "trainer.save_every": None, "trainer.eval_every": None, "algorithm.name": kind,
        "actor_rollout_ref.rollout.n": 2 if kind == "grpo" else 1,
        "actor_rollout_ref.actor.mini_batch_size": size if kind == "grpo" and size == 4 else None,
    }  # fmt: skip
    configuration = settings(tmp_path, tiny, **changes)
    lines = [{"prompt": f"say {i}", "chosen": f"this is {i}", "rejected": "no"} for i in range(count)]
    if kind == "grpo":
        lines = [{"prompt": line["prompt"]} for line in lines]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if kind == "dpo":
        del configuration["reward"]
    train(build_config(configuration))
    assert len(rows(run_dir(tmp_path))) == len(sizes)
    if kind == "grpo":
        files = sorted((run_dir(tmp_path) / "completions").glob("train-*"))
        tables = [Batch.from_columns(pq.read_table(file).to_pydict()) for file in files]
        assert [len(table) for table in tables] == sizes
        assert {prompt for table in tables for prompt in table["prompt"]} == {f"say {i}" for i in range(count)}
    logged = "".join(file.read_text() for file in run_dir(tmp_path).rglob("*.log"))
    assert logged.count(f"1 epoch of {count} rows in batches of {size}: {len(sizes)} steps") == 1
