import io
import json
import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import verl
from tests import forked
from verl._host.log import setup_logging
from verl.errors import ConfigError
from verl.report.page import duration
from verl.report.progress import ConsoleSink, describe
from verl.report.sinks import JsonlSink, Logger, TensorBoardSink, open_logger, run_directory

RECORD = {"reward/mean": 0.25, "kl": 0.001, "loss/actor": -0.5, "updated": True, "note": "fine"}


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_one_record_reaches_every_sink(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    log = open_logger(tmp_path, total_steps=3)
    log.on_log_hook(lambda step, record: seen.append((step, record)))
    for step in (1, 2):
        log.log(step, {**RECORD, "reward/mean": step / 4})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": step, **RECORD, "reward/mean": step / 4} for step in (1, 2)]
    assert [(step, record["reward/mean"]) for step, record in seen] == [(1, 0.25), (2, 0.5)]
    found = scalars(tmp_path / "tensorboard")
    assert found["reward/mean"] == [(1, 0.25), (2, 0.5)]
    assert {"kl", "loss/actor", "updated"} <= found.keys()
    assert "note" not in found


def test_console_shows_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    log = open_logger(None, ["console"], total_steps=8)
    log.log(2, {**RECORD, "rollout/tokens_per_s": 1234.0, "loss/critic": 0.3})
    log.phase("evaluating")
    log.close()
    lines = capsys.readouterr().out.splitlines()
    for part in (
        "step 2/8",
        "reward 0.250",
        "kl 0.0010",
        "loss/actor -0.5000",
        "loss/critic 0.3000",
        "1,234",
        "left 0 s",
    ):
        assert part in lines[0]
    assert lines[1].startswith("about 0 s") and "left: 6 steps of " in lines[1]
    assert lines[2:] == ["evaluating"]


def test_terminal_gets_a_bar_with_the_numbers() -> None:
    out = io.StringIO()
    sink = ConsoleSink(4, console=Console(file=out, force_terminal=True, width=200, highlight=False))
    sink.phase("rollout")
    sink.write(1, {"reward/mean": 0.5, "train/tokens_per_s": 99.0})
    sink.close()
    text = out.getvalue()
    assert "starting" in text
    assert "━" in text
    assert "train tok/s 99" in text
    assert "step 1/4" in text


def test_the_bar_fits_80_columns() -> None:
    out = io.StringIO()
    sink = ConsoleSink(12000, console=Console(file=out, force_terminal=True, width=80, highlight=False))
    sink.phase("evaluating 400 held-out rows")
    sink.write(9999, {"reward/mean": -12.345, "loss/actor": 0.1, "rollout/tokens_per_s": 12345.0})
    sink.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split(r"[\n\r]", out.getvalue())]
    bars = [line for line in lines if "s/step" in line]
    assert bars and all(part in bars[-1] for part in ("━", "9999/12000", "reward -12.345", "left 0 s"))
    assert all(len(line) <= 80 for line in lines if "━" in line)


def test_an_evaluation_without_any_score_says_so() -> None:
    out = io.StringIO()
    ConsoleSink(console=Console(file=out, highlight=False)).write(0, {"eval/reward": None, "eval/abstained": 4.0})
    assert out.getvalue() == "step 0  nothing was measured\n"


def test_descriptions() -> None:
    assert describe({"kl": float("nan"), "reward/mean": None}) == "kl nan"
    assert describe({"loss/actor": -1.5e-08, "kl": 2e-7}) == describe({"loss/actor": 0.0, "kl": 0.0})
    assert describe({"loss/actor": 0.00002}) == "loss/actor +2e-05"
    assert describe({"kl": 0.00003, "reward/mean": -0.0004, "loss/actor": 0.0}) == (
        "reward -0.0004  kl 3e-05  loss/actor +0.0000"
    )
    assert (
        describe({"eval/loss": 0.5, "eval/pairs/accuracy": 0.75}) == "held-out pairs right 75.0%  held-out loss 0.5000"
    )
    assert [duration(s) for s in (0.4, 61, 3725)] == ["0 s", "1 min 1 s", "1 h 2 min"]


def test_any_value_finds_its_place_in_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    values = {
        "nan": float("nan"),
        "inf": float("-inf"),
        "np": np.float32(0.5),
        "tensor": torch.tensor(2.0),
        "many": torch.zeros(2),
        "none": None,
        "int": 3,
    }
    sink.write(1, values)
    row = json.loads((tmp_path / "m.jsonl").read_text())
    assert row == {
        "step": 1,
        "nan": None,
        "inf": None,
        "np": 0.5,
        "tensor": 2.0,
        "many": "tensor([0., 0.])",
        "none": None,
        "int": 3,
    }
    sink.close()


def test_rows_that_a_full_disk_does_not_take_follow_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clean_logging: logging.Logger
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo')  # a crash amid a row
    log = Logger([JsonlSink(file)])
    assert file.read_text() == '{"step": 1}\n'
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
    try:
        for step in (2, 3, 4):
            log.log(step, {"loss": step / 7})
            content = file.read_text()
            assert content.endswith("}\n"), "half a row stays in the file"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [json.loads(line)["step"] for line in content.splitlines()] == [1, 2]
    assert caplog.text.count("they wait, and follow") == 1
    log.log(5, {"loss": 0.5})
    log.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_tensorboards_events_follow_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clean_logging: logging.Logger
) -> None:
    log = Logger([TensorBoardSink(tmp_path)])
    file = next(tmp_path.iterdir())
    log.log(1, {"loss": 1 / 7})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for first in (2, 5):
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
        try:
            for step in range(first, first + 2):
                log.log(step, {"loss": step / 7})
                assert EventAccumulator(str(tmp_path)).Reload().Scalars("loss")[-1].step == first - 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.log(first + 2, {"loss": (first + 2) / 7})
        shown = [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")]
        assert shown == list(range(1, first + 3))
    log.close()
    assert caplog.text.count("they wait, and follow when it does") == 2
    assert "is off from now on" not in caplog.text


def test_failing_sink_and_hook_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"
        calls = 0

        def write(self, step: int, record: object) -> None:
            self.calls += 1
            raise OSError("no space left")

        def close(self) -> None:
            raise AssertionError("is off already")

    def bad_hook(step: int, record: dict[str, Any]) -> None:
        record.clear()
        raise ValueError("mine")

    broken = Broken()
    log = Logger([broken, JsonlSink(tmp_path / "m.jsonl")])
    log.on_log_hook(bad_hook)
    for step in (1, 2):
        log.log(step, {"x": step})
    log.close()
    assert broken.calls == 1
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [
        {"step": 1, "x": 1},
        {"step": 2, "x": 2},
    ]
    assert "log sink 'broken' failed and is off from now on: OSError: no space left" in caplog.text
    assert "bad_hook" in caplog.text


def test_stop_by_the_user_passes_through_a_hook() -> None:
    def stop(step: int, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    log = Logger()
    log.on_log_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        log.log(1, {})


def test_resumed_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=1)
    for step in (2, 3):
        second.write(step, {"loss": 10.0 * step})
    second.close()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_unknown_and_missing_loggers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown logger 'tensorbord': did you mean 'tensorboard'"):
        open_logger(tmp_path, ["tensorbord"])
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of a package that is absent meets
    with pytest.raises(ConfigError, match=r"pip install 'verl-hybrid\[wandb\]'"):
        open_logger(tmp_path, ["wandb"])


def test_sink_that_cannot_be_opened_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    log = open_logger(tmp_path, ["tensorboard"])
    assert [sink.name for sink in log.sinks] == ["metrics.jsonl", "completions"]
    assert "'tensorboard' cannot be opened and is off" in caplog.text
    log.close()


def test_trackers_get_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins with the trackers' signatures, as the trackers themselves are optional."""
    calls: list[Any] = []

    class WandbRun:
        def log(self, data: dict[str, Any], step: int) -> None:
            calls.append(("wandb", step, data))

        def finish(self) -> None:
            calls.append("wandb finished")

    wandb = ModuleType("wandb")
    wandb.Table = lambda columns, data: (columns, data)  # type: ignore[attr-defined]
    wandb.init = lambda **options: calls.append(options) or WandbRun()  # type: ignore[attr-defined]

    trackio = ModuleType("trackio")
    trackio.Table = wandb.Table  # type: ignore[attr-defined]
    trackio.init = lambda *, project, name, config, resume, embed: (  # type: ignore[attr-defined]
        calls.append(("trackio", project, name, config, resume, embed)) or WandbRun()
    )

    class Client:
        def create_run(self, experiment_id: str, tags: dict[str, str]) -> Any:
            calls.append((experiment_id, tags["mlflow.runName"]))
            return type("R", (), {"info": type("I", (), {"run_id": "r1"})})

        def log_param(self, run_id: str, key: str, value: Any) -> None:
            calls.append(("param", key, value))

        def log_metric(self, run_id: str, key: str, value: float, step: int) -> None:
            calls.append(("mlflow", step, key, value))

        def log_table(self, run_id: str, data: Any, artifact_file: str) -> None:
            calls.append(("table", data, artifact_file))

        def set_terminated(self, run_id: str) -> None:
            calls.append("mlflow finished")

    mlflow = ModuleType("mlflow")
    mlflow.MlflowClient = Client  # type: ignore[attr-defined]
    mlflow.set_experiment = lambda name: type("E", (), {"experiment_id": name + "-id"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    log = open_logger(tmp_path, ["wandb", "trackio", "mlflow"], run_id="run-1", project="p", config={"lr": 0.1})
    log.log(1, {"loss": 0.5, "note": "x"})
    log.completions(1, lambda: pa.table({"response": ["yes"], "reward": [0.5]}))
    log.close()
    assert (calls[0]["project"], calls[0]["id"], calls[0]["resume"], calls[0]["config"]) == (
        "p",
        "run-1",
        "allow",
        {"lr": 0.1},
    )
    assert ("trackio", "p", "run-1", {"lr": 0.1}, "allow", False) in calls
    assert ("p-id", "run-1") in calls
    assert calls.count(("wandb", 1, {"loss": 0.5, "note": "x"})) == 2
    assert ("mlflow", 1, "loss", 0.5) in calls
    assert calls.count(("wandb", 1, {"completions": (["response", "reward"], [["yes", 0.5]])})) == 2
    assert ("table", {"response": ["yes"], "reward": [0.5]}, "completions/train-000001.json") in calls
    assert calls[-3:] == ["wandb finished", "wandb finished", "mlflow finished"]


def test_default_directory_of_a_trainer(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=2))

    def log(log_dir: Any) -> Path | None:
        trainer = verl.Trainer(actor, reward_fn=len, algorithm="grpo", n=2, log_dir=log_dir)
        trainer.logger.log(1, {"x": 1})
        trainer.logger.close()
        return trainer.log_dir

    run = log(None)
    assert run is not None and run.parent == Path("runs") and run.name.startswith("grpo-")
    assert (run / "metrics.jsonl").read_text() == '{"step": 1, "x": 1}\n'
    assert log(tmp_path / "mine") == tmp_path / "mine" and (tmp_path / "mine" / "tensorboard").is_dir()
    assert log(False) is run_directory(False, "grpo") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "runs"]
    assert log(None) != run


@pytest.mark.slow
def test_a_second_run_sets_the_log_of_the_first_aside(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reward(texts: list[str]) -> list[float]:
        return [float(len(set(text))) for text in texts]

    def steps(folder: Path) -> list[int]:
        return [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_text().splitlines()]

    def trainer() -> verl.Trainer:
        actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=4))
        checkpoints = {"checkpoint_dir": tmp_path / "checkpoints", "save_every": 1}
        return verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=2, log_dir=tmp_path / "run", **checkpoints)

    first = trainer()
    assert first.resume() is None
    first.fit([["ab"]], 1)
    second = trainer()
    assert second.resume() == 1
    second.step(["cd"])
    run = tmp_path / "run"
    assert steps(run) == [1, 2] and not (run / "earlier-1").exists()  # one run, which went on
    for number in (1, 2):
        trainer().step(["ab"])
        assert steps(run) == [1] and steps(run / "earlier-1") == [1, 2]
        assert (run / f"earlier-{number}" / "tensorboard").is_dir() and (run / "tensorboard").is_dir()
        assert f"which is in {run / f'earlier-{number}'} from now on" in caplog.text


@pytest.fixture
def clean_logging() -> Iterator[logging.Logger]:
    root = logging.getLogger("verl")
    state = (root.level, root.propagate, list(root.handlers))
    root.handlers, root.propagate = [], True  # an earlier test in this process may have set up its own
    yield root
    for handler in root.handlers:
        handler.close()
    root.setLevel(state[0])
    root.propagate, root.handlers = state[1], state[2]


def test_log_level_sets_the_detail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clean_logging: logging.Logger
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "warning")
    setup_logging(tmp_path / "logs" / "001.log")
    logging.getLogger("verl.somewhere").info("quiet")
    logging.getLogger("verl.somewhere").warning("loud")
    err = capsys.readouterr().err
    assert "loud" in err
    assert "quiet" not in err
    text = (tmp_path / "logs" / "001.log").read_text()
    assert "quiet" in text
    assert "loud" in text
    monkeypatch.setenv("LOG_LEVEL", "DEBUG")
    setup_logging()
    logging.getLogger("verl.somewhere").debug("detail")
    assert capsys.readouterr().err.count("detail") == 1
    assert "detail" not in (tmp_path / "logs" / "001.log").read_text()
    monkeypatch.setenv("LOG_LEVEL", "DEBG")
    with pytest.raises(ConfigError, match="LOG_LEVEL is 'DEBG': did you mean 'DEBUG'"):
        setup_logging()


def test_a_full_disk_is_one_warning_and_log_messages_follow_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clean_logging: logging.Logger
) -> None:
    file = tmp_path / "001.log"
    setup_logging(file)
    log = logging.getLogger("verl.somewhere")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in (1, 2):
        log.info("good %d", number)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))
        try:
            for step in range(5):
                log.info("step %d of %d", step, number)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        shown = capsys.readouterr().err
        assert "Logging error" not in shown and "Traceback" not in shown
        assert shown.count("they wait, and follow when it does") == 1
    log.info("good again")
    messages = [line.split(": ", 1)[1] for line in file.read_text().splitlines() if "verl.somewhere" in line]
    steps = [[f"good {n}", *(f"step {step} of {n}" for step in range(5))] for n in (1, 2)]
    assert messages == [*steps[0], *steps[1], "good again"]
    log.info("%d", "no number")
    assert "Logging error" in capsys.readouterr().err


TRAINER = """
trainer = verl.Trainer(actor, reward_fn=lambda texts: [1.0] * len(texts), n=2, log_dir=False)
trainer.step(['a'])
"""
PLAIN_LOOP = """
sequences = actor.generate_sequences(['a', 'b'])
actor.update(sequences, verl.Reward(reward_fn=lambda texts: [1.0] * len(texts)).get_reward(sequences)['reward'])
"""


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("script", "level", "is_shown", "lines"),
    [
        (TRAINER, "DEBUG", True, (r"step 1: rollout \(actor\) took", r"reward/mean=1\.0")),
        (TRAINER, "warning", False, (r"step 1: rollout \(actor\) took", r"reward/mean=1\.0")),
        (PLAIN_LOOP, "DEBUG", True, (r"DEBUG verl.cluster.group: actor.(generate|update)\w* took \d",)),
        (PLAIN_LOOP, "of another program", False, (r"DEBUG verl.cluster.group",)),
    ],
)
def test_log_level_is_followed_in_scripts(
    tiny: Path, script: str, level: str, is_shown: bool, lines: tuple[str, ...]
) -> None:
    script = (
        "import sys, verl\nactor = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 2}, algorithm='grpo')\n" + script
    )
    command, env = [sys.executable, "-c", script, str(tiny)], {**os.environ, "LOG_LEVEL": level}
    done = forked.run(command, env=env, timeout=120, check=True)
    for line in lines:
        assert (re.search(line, done.stderr) is not None) is is_shown, line
