"""Whole runs of `verl train` with several tasks: what they log and evaluate, resume, and what is refused."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import assert_same_run, count_lines, evals, rows, run_dir, run_process, settings
from verl.config import build_config
from verl.errors import ConfigError, DataError
from verl.run.build import check_settings
from verl.run.train import train

SHORT = {"max_new_tokens": 6}


def mixed(tmp_path: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a small run of two tasks, with dotted keys changed."""
    for name, count in (("train", 12), ("eval", 6)):
        lines = [{"prompt": f"{name} {task} {i}", "task": task} for i in range(count) for task in ("chat", "sum")]
        (tmp_path / f"{name}-mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward = f"{tmp_path / 'reward.py'}:low"
    tasks: list[dict[str, Any]] = [
        {"name": "chat", "type": "ppo", "reward_model": reward, "n": 2, "share": 1, "sampling": SHORT},
        {"name": "sum", "type": "grpo", "reward_model": reward, "n": 4, "share": 2, "sampling": SHORT},
    ]
    given = settings(
        tmp_path,
        model,
        **{
            "data.train": str(tmp_path / "train-mixed.jsonl"),
            "data.eval": str(tmp_path / "eval-mixed.jsonl"),
            "actor_rollout_ref.rollout.n": 8,  # as it is by default: each task has its own
            "tasks": tasks,
            **changes,
        },
    )
    del given["reward"]
    return given


@pytest.mark.slow
def test_a_run_of_two_tasks_goes_on_where_it_ended(tmp_path: Path, tiny: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    summary = train(build_config(mixed(tmp_path / "a", tiny)))
    train(build_config(mixed(tmp_path / "b", tiny, **{"trainer.total_steps": 4, "trainer.eval_every": None})))
    train(build_config(mixed(tmp_path / "b", tiny, **{"trainer.eval_every": None})))
    a, b = run_dir(tmp_path / "a"), run_dir(tmp_path / "b")
    taught = [row for row in rows(a) if "reward/mean" in row]
    # Shares of 1 and 2 of 3 prompts, with 2 and 4 samples each.
    assert all(row["task/chat/samples"] == 2 and row["task/sum/samples"] == 8 for row in taught)
    assert taught[-3:] == [row for row in rows(b) if "reward/mean" in row][-3:]
    assert summary["eval_problems"] == 12
    assert {"task/chat/reward", "task/sum/reward"} <= evals(a)[-1].keys()
    assert "critic-chat" in {path.name for path in (a / "checkpoints" / "latest").iterdir()}
    page = (a / "report.html").read_text()
    for name in ("task/chat/reward/mean", "task/sum/reward/mean", "task/sum/share", "eval/task/chat/reward"):
        assert f'"{name}"' in page


@pytest.mark.slow
def test_a_guard_and_a_scheduler_are_settings(tmp_path: Path, tiny: Path) -> None:
    guards = [{"monitor_metrics": ["task/sum/reward/mean", "truth"], "rollback_steps": 2, "baseline": 4, "window": 2}]
    scheduler = {"initial_weights": {"chat": 3.0, "sum": 1.0}, "patience": 2}
    changes = {"trainer.guards": guards, "trainer.task_scheduler": scheduler, "trainer.total_steps": 3}
    train(build_config(mixed(tmp_path, tiny, **changes, **{"trainer.eval_every": None})))
    taught = [row for row in rows(run_dir(tmp_path)) if "reward/mean" in row]
    assert {row["guard/unseen"] for row in taught} == {"truth"}
    assert all(row["task/chat/share"] > 0.6 for row in taught)
    assert "the guard&#39;s metrics that never came: truth" in (run_dir(tmp_path) / "report.html").read_text()
    state = json.loads((run_dir(tmp_path) / "checkpoints" / "latest" / "trainer.json").read_text())
    assert len(state["guards"][0]["metrics"]["task/sum/reward/mean"]["values"]) > 0
    assert state["mixture"]["weights"].keys() == {"chat", "sum"}
    scheduler["min_weight"] = 0.9
    with pytest.raises(ConfigError, match=r"min_weight=0\.9 for each of 2 tasks"):
        check_settings(build_config(mixed(tmp_path, tiny, **changes)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_survive_sigkill_at_random_moments(tmp_path: Path, tiny: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    longer = {"trainer.total_steps": 20, "trainer.save_every": 1}
    train(build_config(mixed(tmp_path / "a", tiny, **longer)))
    configuration = mixed(tmp_path / "b", tiny, **longer)
    metrics, rng = tmp_path / "b" / "runs" / "latest" / "metrics.jsonl", random.Random(0)
    for _ in range(5):
        process = run_process(tmp_path, configuration)
        wanted = count_lines(metrics) + rng.randint(0, 3)
        while process.poll() is None and count_lines(metrics) <= wanted:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.communicate()
    process = run_process(tmp_path, configuration)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-3000:]
    assert_same_run(run_dir(tmp_path / "a"), run_dir(tmp_path / "b"))


@pytest.mark.slow
def test_tasks_that_do_not_wait_for_each_other(tmp_path: Path, tiny: Path) -> None:
    corrected = {"options": {"rollout_is": "token"}}
    given = mixed(tmp_path, tiny, **{"trainer.max_staleness": 1, "actor_rollout_ref.actor.optim.lr": 1e-4})
    given["tasks"] = [task | corrected for task in given["tasks"]]
    train(build_config(given))
    taught = [row for row in rows(run_dir(tmp_path)) if "reward/mean" in row]
    assert len(taught) == 6 and max(row["rollout/staleness/max"] for row in taught) <= 1


@pytest.mark.slow
def test_a_task_of_recorded_responses_beside_one_that_samples(tmp_path: Path, tiny: Path) -> None:
    lines = [{"prompt": f"Say {i}", "completion": f"number {i}"} for i in range(8)]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = mixed(tmp_path, tiny, **{"data.batch_size": 6, "trainer.total_steps": 2, "data.eval": None})
    given["trainer"]["eval_every"] = None
    given["tasks"] = [given["tasks"][1], {"name": "shown", "type": "sft", "share": 1}]
    given["data"]["train"] = {"sum": str(tmp_path / "train.jsonl"), "shown": str(tmp_path / "shown.jsonl")}
    train(build_config(given))
    taught = [row for row in rows(run_dir(tmp_path)) if "task/sum/loss" in row]
    assert len(taught) == 2 and all(row["task/shown/samples"] == 2 for row in taught)
    assert all(row["task/shown/loss"] > 0 for row in taught)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"actor_rollout_ref.rollout.num_rollout_workers": 2, "trainer.max_staleness": 1}, ConfigError, "own ranks"),
        ({"trainer.max_staleness": 1, "tasks.1.options": {"rollout_is": None}}, ConfigError, "does not correct"),
        ({"algorithm.name": "ppo"}, ConfigError, "algorithm: is of a run of one task"),
        ({"data.train": {"chat": "absent.jsonl", "sum": "absent.jsonl"}}, DataError, "absent.jsonl does not exist"),
        ({"data.train": {"chat": "TRAIN", "sums": "TRAIN"}}, DataError, "did you mean 'sum'"),
        ({"data.train": {"chat": "TRAIN"}}, DataError, "nothing for task 'sum'"),
        ({"data.train": "TRAIN"}, DataError, "row 0 names no task"),
        ({"data.train": {"chat": {"path": "TRAIN", "task": "a"}}}, ConfigError, "must name for task 'chat' either"),
        ({"actor_rollout_ref.actor.mini_batch_size": 11}, ConfigError, "at most the 10 rows"),
        ({"tasks.1.type": "sft"}, ConfigError, "task 'sum': algorithm 'sft' has no reward"),
        ({"tasks.1.type": "reward_model", "tasks.1.reward_model": None}, ConfigError, "cannot share an actor"),
        ({"tasks.1.type": "sft", "tasks.1.reward_model": None}, ConfigError, "give each task its data"),
        ({"tasks.1.reward_model": "absent.py:f"}, ConfigError, "absent.py does not exist"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_with_tasks_is_found_before_anything_is_made(
    tmp_path: Path, tiny: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    of_tasks = {key: value for key, value in changes.items() if key.startswith("tasks.")}
    text = json.dumps({key: value for key, value in changes.items() if key not in of_tasks})
    given = mixed(tmp_path, tiny, **json.loads(text.replace("TRAIN", str(tmp_path / "train.jsonl"))))
    for key, value in of_tasks.items():
        _, number, name = key.split(".")
        given["tasks"][int(number)][name] = value
    with pytest.raises(error, match=words):
        check_settings(build_config(given))


def test_prompts_in_their_own_order(tmp_path: Path, tiny: Path) -> None:
    changes = {"data.shuffle": False, "trainer.total_steps": 1, "trainer.eval_every": None}
    seen = tmp_path / "seen"
    given = settings(tmp_path, tiny, **changes)
    (tmp_path / "reward.py").write_text(
        f"def low(responses, prompts):\n    open({str(seen)!r}, 'a').write('\\n'.join(prompts) + '\\n')\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    given["data"]["eval"] = None
    train(build_config(given))
    asked = list(dict.fromkeys(seen.read_text().splitlines()))
    assert asked == [f"Tell me about the number {i}" for i in range(3)]
