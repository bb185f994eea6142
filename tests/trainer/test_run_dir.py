import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from verl.batch import Batch
from verl.errors import CheckpointError, ConfigError
from verl.trainer.run_dir import Run, open_run, rewind_jsonl


def opened(root: Path, **options: object) -> Run:
    run = open_run(root, "grpo-tiny-12ab", **options)  # type: ignore[arg-type]
    run.close()
    return run


def test_new_then_resumed_then_anew_after_it_finished(tmp_path: Path) -> None:
    run = opened(tmp_path, config="seed: 1\n")
    assert (run.status, run.attempt) == ("new", 1)
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"
    assert run.log == run.path / "logs" / "001.log"
    assert (tmp_path / "latest").resolve() == run.path
    (run.checkpoints / "step-000001").mkdir()

    again = opened(tmp_path)
    assert (again.status, again.attempt) == ("resumed", 2)
    assert (again.checkpoints / "step-000001").is_dir()
    again.finish({"accuracy_after": 0.5}, steps=10)

    anew = opened(tmp_path)
    assert (anew.status, anew.attempt) == ("anew", 1)
    assert list(anew.checkpoints.iterdir()) == []
    old = tmp_path / "grpo-tiny-12ab.1"
    assert json.loads((old / "summary.json").read_text()) == {"accuracy_after": 0.5, "state": "finished", "steps": 10}
    assert (old / "checkpoints" / "step-000001").is_dir()


def test_longer_run_goes_on_from_a_finished_shorter_one(tmp_path: Path) -> None:
    opened(tmp_path, total_steps=10).finish({}, steps=10)
    assert opened(tmp_path, total_steps=20).status == "resumed"
    assert opened(tmp_path, total_steps=10).status == "anew"


def test_stopped_run_is_not_finished_and_fresh_sets_it_aside(tmp_path: Path) -> None:
    (opened(tmp_path).path / "summary.json").write_text('{"state": "stopped"}')
    assert opened(tmp_path).status == "resumed"
    assert opened(tmp_path, fresh=True).status == "anew"
    assert opened(tmp_path, fresh=True).status == "anew"
    assert {"grpo-tiny-12ab", "grpo-tiny-12ab.1", "grpo-tiny-12ab.2"} <= {p.name for p in tmp_path.iterdir()}


def test_torn_summary_does_not_finish_a_run(tmp_path: Path) -> None:
    run = opened(tmp_path)
    (run.path / "summary.json").write_text('{"state": "finis')
    assert opened(tmp_path).status == "resumed"


def test_rewind_forgets_what_came_after_the_commit(tmp_path: Path) -> None:
    run = opened(tmp_path)
    rows = [json.dumps({"step": step, "loss": step / 7}) + "\n" for step in (1, 2, 2, 3, 4)]
    run.metrics.write_text("".join(rows) + '{"step": 2, "lo')
    run.evals.write_text("".join(rows))
    for step in (0, 2, 3):
        Batch.from_columns({"id": ["a"]}).to_parquet(run.completions / f"step-{step}.parquet")
    run.rewind(2)
    assert run.metrics.read_text() == run.evals.read_text() == "".join(rows[:3])
    assert sorted(p.name for p in run.completions.iterdir()) == ["step-0.parquet", "step-2.parquet"]
    rewind_jsonl(run.metrics, 0)
    assert run.metrics.read_text() == ""


def test_an_evaluation_is_one_row_and_a_full_disk_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = opened(tmp_path)
    for step, reward in ((0, 0.1), (2, 0.2), (2, 0.3)):
        run.note_evaluation({"step": step, "reward": reward})
    noted = run.evals.read_text()
    assert [json.loads(line) for line in noted.splitlines()] == [
        {"step": 0, "reward": 0.1},
        {"step": 2, "reward": 0.3},
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(noted), hard))
    try:
        run.note_evaluation({"step": 4, "reward": 0.4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the evaluation of step 4 was not written to" in caplog.text and str(run.evals) in caplog.text
    assert run.evals.read_text() == noted


def test_a_disk_that_takes_nothing_is_told_in_words(tmp_path: Path) -> None:
    run = opened(tmp_path)
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(50))
    run.metrics.write_text(rows)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        for write in (lambda: run.rewind(40), lambda: run.finish({"reward_after": 0.5}, steps=40)):
            with pytest.raises(CheckpointError, match="free space and run the same command again"):
                write()
        run.note_environment({"python": "3"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.metrics.read_text() == rows


def test_files_that_say_something_odd_say_nothing(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.metrics.write_text('{"step": null}\n{"step": "x"}\n[1]\n{"loss": 1}\n{"step": 1}\n\xff\n' + "[" * 200_000)
    run.rewind(2)
    assert run.metrics.read_text() == '{"step": 1}\n'
    for steps in ("many", None):
        (run.path / "summary.json").write_text(json.dumps({"state": "finished", "steps": steps}))
        assert opened(tmp_path, total_steps=4).status == "resumed"
    lock = tmp_path / ".grpo-tiny-12ab.lock"
    host = os.uname().nodename
    for pid, started in (("x", ""), (0, ""), (2**70, ""), (os.getpid(), 7)):
        lock.write_text(json.dumps({"pid": pid, "host": host, "started": started}))
        assert opened(tmp_path, total_steps=4).status == "resumed"


HOLD = """
import sys, time
from verl.trainer.run_dir import open_run
run = open_run(sys.argv[1], "grpo-tiny-12ab")
print(run.status, flush=True)
time.sleep(60)
"""


def hold(root: Path) -> subprocess.Popen[bytes]:
    child = forked.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"new\n"
    return child


def test_lock_of_a_living_process_holds_and_that_of_a_dead_one_does_not(tmp_path: Path) -> None:
    child = hold(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"process {child.pid} on .* works on the run"):
            open_run(tmp_path, "grpo-tiny-12ab")
        assert opened(tmp_path / "elsewhere").status == "new"
    finally:
        child.kill()
        child.wait()
    assert opened(tmp_path).status == "resumed"


def test_lock_of_a_process_whose_id_was_used_again_is_taken_over(tmp_path: Path) -> None:
    opened(tmp_path)
    lock = tmp_path / ".grpo-tiny-12ab.lock"
    host = os.uname().nodename
    lock.write_text(json.dumps({"pid": 1, "host": host, "started": "another boot:7"}))
    assert opened(tmp_path).status == "resumed"
    lock.write_text(json.dumps({"pid": 1, "host": "another-host", "started": ""}))
    with pytest.raises(ConfigError, match="process 1 on another-host"):
        open_run(tmp_path, "grpo-tiny-12ab")
    lock.write_text('{"pid": 1, "ho')
    assert opened(tmp_path).status == "resumed"


def test_closed_run_is_free_for_others(tmp_path: Path) -> None:
    with open_run(tmp_path, "grpo-tiny-12ab"):
        code = "import sys; from verl.trainer.run_dir import open_run; open_run(sys.argv[1], 'grpo-tiny-12ab')"
        refused = forked.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        assert refused.returncode != 0
        assert "works on the run" in refused.stderr
    forked.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_unusable_place_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used.*trainer\.output_dir"):
        open_run(tmp_path / "file" / "runs", "x")
