import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import forked
from verl.batch import Batch
from verl.errors import CheckpointError, ConfigError
from verl.run import lock as run_lock
from verl.run.folder import Run, open_run, rewind_jsonl


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
import os, sys, time
from verl.run.folder import open_run
run = open_run(sys.argv[1], "grpo-tiny-12ab")
child = 0
if "fork" in sys.argv:
    child = os.fork()
    if not child:
        os.close(1)
        time.sleep(60)
        os._exit(0)
print(run.status, child, flush=True)
time.sleep(60)
"""
#: Runs a command on a host of another name: in a namespace of its own, of the same machine.
ELSEWHERE = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname another-host && exec "$0" "$@"']


def hold(root: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that works on a run, and its child."""
    child = forked.Popen([sys.executable, "-c", HOLD, str(root), *arguments], stdout=subprocess.PIPE)
    assert child.stdout is not None
    status, forked_child = child.stdout.readline().split()
    assert status == b"new"
    return child, int(forked_child)


def test_lock_of_a_living_process_holds_and_that_of_a_dead_one_does_not(tmp_path: Path) -> None:
    child, _ = hold(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"process {child.pid} on .* works on the run"):
            open_run(tmp_path, "grpo-tiny-12ab")
        assert opened(tmp_path / "elsewhere").status == "new"
    finally:
        child.kill()
        child.wait()
    assert opened(tmp_path).status == "resumed"


def test_lock_ends_with_its_holder_although_a_forked_child_lives_on(tmp_path: Path) -> None:
    holder, child = hold(tmp_path, "fork")
    holder.kill()
    holder.wait()
    try:
        assert opened(tmp_path).status == "resumed"
    finally:
        os.kill(child, signal.SIGKILL)


def test_run_goes_on_under_another_host_name_once_its_process_is_gone(tmp_path: Path) -> None:
    if subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode:
        pytest.skip("host names of namespaces cannot be set here")
    command = [*ELSEWHERE, sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as there:
        assert there.stdout is not None
        try:
            assert there.stdout.readline().startswith(b"new")
            with pytest.raises(ConfigError, match="on another-host works on the run"):
                open_run(tmp_path, "grpo-tiny-12ab")
        finally:
            there.kill()
    checkpoints = tmp_path / "grpo-tiny-12ab" / "checkpoints"
    (checkpoints / f".staging-another-host~{there.pid}~~step-000002").mkdir()
    began = time.monotonic()
    assert opened(tmp_path).status == "resumed"
    assert time.monotonic() - began < run_lock.LEASE / 2  # one machine: the lock says it, nothing is waited for
    assert list(checkpoints.iterdir()) == []


def test_file_that_a_process_of_another_machine_renews_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_lock, "LEASE", 0.5)
    opened(tmp_path)
    lock = tmp_path / ".grpo-tiny-12ab.lock"
    holder = json.dumps({"pid": 1, "host": "another-host", "started": "", "boot": "another"})
    lock.write_text(holder)
    renewed = threading.Event()

    def renew() -> None:
        while not renewed.wait(0.1):
            os.utime(lock)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="process 1 on another-host"):
            open_run(tmp_path, "grpo-tiny-12ab")
    finally:
        renewed.set()
        thread.join()
    assert lock.read_text() == holder
    assert opened(tmp_path).status == "resumed"
    assert "waiting 0 s whether it still does" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_has_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("verl._base.durable.fcntl.flock", refused)
    monkeypatch.setattr(run_lock, "LEASE", 0.5)
    monkeypatch.setattr(run_lock, "RENEWAL", 0.05)
    with open_run(tmp_path, "grpo-tiny-12ab") as run:
        monkeypatch.setattr("socket.gethostname", lambda: "another-host")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* works on the run"):
            open_run(tmp_path, "grpo-tiny-12ab")
        run.lock._closed.set()  # as if its process were gone
        time.sleep(0.1)
        assert opened(tmp_path).status == "resumed"


def test_lock_of_a_process_whose_id_was_used_again_is_taken_over(tmp_path: Path) -> None:
    opened(tmp_path)
    lock = tmp_path / ".grpo-tiny-12ab.lock"
    host = os.uname().nodename
    lock.write_text(json.dumps({"pid": 1, "host": host, "started": "another boot:7"}))
    assert opened(tmp_path).status == "resumed"
    lock.write_text('{"pid": 1, "ho')
    assert opened(tmp_path).status == "resumed"


def test_closed_run_is_free_for_others(tmp_path: Path) -> None:
    with open_run(tmp_path, "grpo-tiny-12ab"):
        code = "import sys; from verl.run.folder import open_run; open_run(sys.argv[1], 'grpo-tiny-12ab')"
        refused = forked.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        assert refused.returncode != 0
        assert "works on the run" in refused.stderr
    forked.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_unusable_place_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used.*trainer\.output_dir"):
        open_run(tmp_path / "file" / "runs", "x")
