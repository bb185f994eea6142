"""`verl tune` with runs of a tiny model: trials that fail, studies that are killed, what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial

from tests import forked
from verl._base.durable import alive
from verl.config import load_config, to_yaml
from verl.errors import ConfigError, VerlError
from verl.tune import study as studies
from verl.tune.space import parse
from verl.tune.study import Search, ended, rows, tune, write_results
from verl.tune.trial import TrialFailedError, UnknownMetricError, value_of

LR = "actor_rollout_ref.actor.optim.lr"
REWARD = """
import os, signal, time
from pathlib import Path

calls = []

def low(responses, prompts):
    return [sum(ord(c) < 100 for c in r) / max(len(r), 1) for r in responses]

def half(responses, prompts):
    return [value / 2 for value in low(responses, prompts)]

def dies(responses, prompts):
    os.kill(os.getpid(), signal.SIGKILL)

def held(responses, prompts):
    calls.append(1)
    while len(calls) == 3 and not Path(__file__).with_name("go").exists():
        time.sleep(0.01)
    return low(responses, prompts)
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny: Path) -> Path:
    """Settings of a run of seconds."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(12)))
    rollout = {"n": 4, "max_new_tokens": 6}
    content: dict[str, Any] = {
        "actor_rollout_ref": {"model": {"path": str(tiny)}, "actor": {"optim": {"lr": 1e-3}}, "rollout": rollout},
        "data": {"train": str(tmp_path / "train.jsonl"), "batch_size": 3},
        "reward": {"path": f"{tmp_path / 'reward.py'}:low"},
        "trainer": {"total_steps": 2, "save_every": 1, "loggers": [], "output_dir": str(tmp_path / "usual")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    return tmp_path / "recipe.yaml"


def search_of(recipe: Path, *searches: str, **options: Any) -> Search:
    usual = {"metric": "reward/mean", "direction": "maximize", "trials": 3, "seed": 0, "out": recipe.parent / "study"}
    return Search(recipe, (), parse(searches), **{**usual, **options})


def command(recipe: Path, *arguments: str) -> list[str]:
    out = str(recipe.parent / "study")
    return [sys.executable, "-m", "verl", "tune", str(recipe), "--out", out, *arguments]


ENV = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_trial_that_dies_costs_itself_alone(recipe: Path) -> None:
    rewards = ",".join(f"{recipe.parent / 'reward.py'}:{name}" for name in ("half", "dies", "low"))
    searched = ("reward.process=false", "--search", f"reward.path={rewards}")
    done = forked.run(command(recipe, *searched), env=ENV, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    study = recipe.parent / "study"
    assert "killed by SIGKILL (out of memory?)" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("trial ")]
    assert [line.split(":")[0] for line in lines] == ["trial 0", "trial 1", "trial 2"]
    # What the best settings are is known: the same reward, not halved.
    best = load_config(study / "best.yaml")
    assert best == load_config(recipe, ["reward.process=false"])
    assert f"verl train {study / 'best.yaml'}" in done.stdout
    page = (study / "report.html").read_text()
    assert page.count("<h1>2 runs</h1>") == 1 and "path=" in page  # named by what was searched
    values = {int(n): value_of(next((study / "runs").glob(f"trial-00{n}-*")), "reward/mean", 1) for n in (0, 2)}
    assert values[2] > values[0] > 0
    assert f"{values[2]:.6g}" in (study / "best.yaml").read_text()


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_with_the_run_that_was_cut_off(recipe: Path) -> None:
    runs, held = recipe.parent / "study" / "runs", f"reward.path={recipe.parent / 'reward.py'}:held"
    arguments = ["--search", f"{LR}=1e-4..1e-2:log", "--trials", "2", held, "trainer.total_steps=4"]
    process = forked.Popen(command(recipe, *arguments), env=ENV)
    until(lambda: process.poll() is not None or any(runs.glob("trial-000-*/checkpoints/step-000002")))
    (run,) = runs.glob("trial-000-*")
    trainer = json.loads((runs / f".{run.name}.lock").read_text())["pid"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not alive(trainer))  # nothing trains on unseen
    (recipe.parent / "go").touch()

    overrides = (held, "trainer.total_steps=4")
    search = replace(search_of(recipe, f"{LR}=1e-4..1e-2:log", trials=2), overrides=overrides)
    before, first, both = map(ended, tune(search))
    assert before == []
    assert [trial.user_attrs["run"][:9] for trial in first] == ["trial-000"]
    assert [trial.state.name for trial in both] == ["COMPLETE", "COMPLETE"]
    attempts = {path.name[:9]: len(list((path / "logs").glob("*.log"))) for path in runs.glob("trial-*")}
    assert attempts == {"trial-000": 2, "trial-001": 1}
    assert "going on from step 2" in (run / "logs" / "002.log").read_text()
    assert list(map(ended, tune(search))) == [both]  # nothing is left to do


def lrs(search: Search, anew: bool) -> list[float]:
    """The proposals of a study whose trials are worth more the nearer they are to 1e-3."""
    found = []
    search.out.mkdir()
    study = studies._open(search)
    while (trial := studies._next(study, search)) is not None:
        if anew:  # as by a process that was killed while this trial ran
            study = studies._open(search)
            again = studies._next(study, search)
            assert again is not None and again.number == trial.number
            trial = again
        found.append(trial.params[LR])
        study.tell(trial.number, -abs(found[-1] - 1e-3))
    return found


@pytest.mark.slow
def test_a_study_that_was_cut_off_proposes_what_it_would_have_proposed(recipe: Path) -> None:
    search = search_of(recipe, f"{LR}=1e-5..1e-1:log", trials=16)
    first = lrs(search, anew=False)
    assert lrs(replace(search, out=recipe.parent / "b"), anew=True) == first
    assert lrs(replace(search, out=recipe.parent / "c", seed=1), anew=False) != first
    assert len(set(first)) == 16
    # The library does search: later proposals are nearer to the best value than random ones.
    assert sum(abs(lr - 1e-3) for lr in first[10:]) / 6 < sum(abs(lr - 1e-3) for lr in first[:10]) / 10


def test_more_trials_continue_a_study_and_a_small_space_is_tried_whole(recipe: Path) -> None:
    search = search_of(recipe, "actor_rollout_ref.rollout.n=2..5", trials=2)
    search.out.mkdir()

    def numbers(asked: Search) -> list[int]:
        study, found = studies._open(asked), []
        while (trial := studies._next(study, asked)) is not None:
            found.extend(trial.params.values())
            study.tell(trial.number, 1.0)
        return found

    first = numbers(search)
    assert len(first) == 2
    assert sorted({*first, *numbers(replace(search, trials=9))}) == [2, 3, 4, 5]
    assert numbers(replace(search, trials=9)) == []


@pytest.mark.parametrize(
    ("searched", "said"),
    [
        (f"{LR}s=1e-6..1e-4", "unknown key; did you mean 'actor_rollout_ref.actor.optim.lr'?"),
        ("actor_rollout_ref.rollout.n=0..4", "--search actor_rollout_ref.rollout.n: 0 is refused"),
        ("algorithm.name=grpo,grop", "--search algorithm.name: grop is refused"),
        ("reward.path=reward.py:nothing,reward.py:low", "--search reward.path: reward.py:nothing is refused"),
    ],
)
def test_values_that_a_run_would_refuse_are_refused_before_the_first(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, searched: str, said: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    with pytest.raises(ConfigError) as error:
        search_of(recipe, searched).check()
    assert said in str(error.value)


def test_the_ends_of_a_range_are_checked_and_the_file_need_not_be_right_without(recipe: Path) -> None:
    search_of(recipe, f"{LR}=0.1..0.2", "actor_rollout_ref.rollout.n=2..4").check()
    wrong = replace(search_of(recipe, "algorithm.name=grpo,rloo"), overrides=("algorithm.name=none_such",))
    wrong.check()


def test_a_directory_holds_one_study_and_one_process(recipe: Path) -> None:
    search = search_of(recipe, f"{LR}=1e-5..1e-1:log")
    going = tune(search)
    assert ended(next(going)) == []
    with pytest.raises(ConfigError, match="another process works on the study"):
        next(tune(search))
    going.close()
    with pytest.raises(ConfigError, match="holds a study of another metric and seed: choose another --out"):
        next(tune(replace(search, metric="loss", seed=3)))
    with pytest.raises(ConfigError, match="of another search and settings"):
        next(tune(replace(search, space=parse([f"{LR}=1e-5..1e-2:log"]), overrides=("trainer.total_steps=3",))))
    with (search.out / "study.jsonl").open("a") as journal:
        journal.write('{"torn')
    (search.out / "study.jsonl.lock").symlink_to("study.jsonl")
    assert ended(next(tune(search))) == []


def test_without_the_library_the_extra_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-hybrid\[tune\]'"):
        next(tune(search_of(recipe, f"{LR}=1e-5..1e-1:log")))


def metrics(run: Path, values: list[float | None]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "reward/mean": value, "loss": 1.0} for step, value in enumerate(values, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_value_of_a_run(tmp_path: Path) -> None:
    metrics(tmp_path, [1.0, 2.0, 4.0, None])
    assert value_of(tmp_path, "reward/mean", 1) == 4.0
    assert value_of(tmp_path, "reward/mean", 2) == 3.0
    with pytest.raises(UnknownMetricError, match="has the metric 'reward/men': did you mean 'reward/mean'"):
        value_of(tmp_path, "reward/men", 1)
    metrics(tmp_path, [None])
    with pytest.raises(TrialFailedError, match="never a finite number"):
        value_of(tmp_path, "reward/mean", 1)


def test_pruning_follows_the_median_after_a_warm_up(recipe: Path) -> None:
    search = replace(search_of(recipe, f"{LR}=1e-5..1e-1:log", prune=True), overrides=("trainer.total_steps=10",))
    search.out.mkdir()
    study = studies._open(search)
    for level in range(5):
        trial = study.ask()
        for step in range(1, 11):
            trial.report(float(level), step)
        study.tell(trial, float(level))
    run = recipe.parent / "run"
    for value, steps, hopeless in ((1.0, 10, True), (3.0, 10, False), (1.0, 2, False)):
        metrics(run, [value] * steps)
        assert studies._is_hopeless(study, study.ask(), run, search) is hopeless


@pytest.mark.slow
def test_a_run_below_the_median_is_stopped_and_has_saved(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "WARM_UP", 0)
    search = search_of(recipe, f"{LR}=1e-4..1e-2", trials=6, prune=True)
    search = replace(search, overrides=("trainer.total_steps=100000",))
    search.out.mkdir()
    study = studies._open(search)
    for _ in range(5):
        trial = study.ask()
        for step in range(1, 6):
            trial.report(1.0, step)  # more than the reward of an untrained model
        study.tell(trial, 1.0)
    *_, study = tune(search)
    last, run = study.trials[5], search.out / "runs" / study.trials[5].user_attrs["run"]
    assert (last.state.name, [*last.user_attrs]) == ("PRUNED", ["run"])
    assert last.value is not None and 0 < last.value < 1
    assert (run / "checkpoints" / "latest").exists() and not (run / "summary.json").exists()
    assert "finishing this step and saving a checkpoint" in (search.out / "trial-005.log").read_text()


def test_a_misspelled_metric_ends_the_study_at_the_first_run(recipe: Path) -> None:
    search = search_of(recipe, f"{LR}=1e-3,1e-2", metric="reward/maen")
    going = tune(search)
    next(going)
    _, run = search.command("trial-000", {LR: "1e-3"})
    metrics(run, [0.5, 0.6])  # a run that was finished when the study was killed is not run again
    (run / "summary.json").write_text(json.dumps({"state": "finished", "steps": 2}))
    with pytest.raises(VerlError, match="trial 0: no record of the run has the metric 'reward/maen': did you mean"):
        next(going)


def test_trials_are_ranked_and_their_runs_are_on_one_page(recipe: Path) -> None:
    search = search_of(recipe, f"{LR}=1e-4..1e-2", direction="minimize")
    search.out.mkdir()
    study = studies._open(search)
    ends = ((0.002, "FAIL", None), (0.001, "COMPLETE", 2.0), (0.003, "COMPLETE", 1.0), (0.004, "PRUNED", 0.5))
    for number, (lr, state, value) in enumerate(ends):
        run = search.out / "runs" / f"trial-{number:03d}"
        values, known = search.space, {"run": run.name}
        study.add_trial(
            create_trial(state=TrialState[state], value=value, params={LR: lr}, distributions=values, user_attrs=known)
        )
        if number == 0:
            assert write_results(search, study) == (None, None)
            continue
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(to_yaml(search.settings({LR: str(lr)})))
        metrics(run, [0.0, float(number)])
    best, page = write_results(search, study)
    assert best is not None and load_config(best).actor_rollout_ref.actor.optim.lr == 0.003
    assert [line[1] for line in rows(search, study)[1:]] == ["0.003", "0.001", "0.004", "0.002"]
    assert page is not None
    assert all(f"lr={value}" in page.read_text() for value in ("0.001", "0.003", "0.004"))


def test_values_that_were_tried_are_answered_from_their_run(recipe: Path) -> None:
    search = search_of(recipe, "actor_rollout_ref.rollout.n=2..100", trials=3)
    search.out.mkdir()
    study = studies._open(search)
    key = "actor_rollout_ref.rollout.n"
    for number, (n, state, value) in enumerate(((4, "FAIL", None), (4, "COMPLETE", 0.5), (5, "COMPLETE", 0.25))):
        run = search.out / "runs" / f"trial-{number:03d}"
        study.add_trial(
            create_trial(
                state=TrialState[state], value=value, params={key: n}, distributions=search.space,
                user_attrs={"run": run.name},
            )
        )  # fmt: skip
        metrics(run, [value])
    study.enqueue_trial({key: 4})
    studies._run(study, study.ask(search.space), search)
    again = study.trials[3]
    assert (again.value, again.user_attrs) == (0.5, {"run": "trial-001", "as": 1})
    assert not (search.out / "trial-003.log").exists(), "nothing was run"
    assert [row[0] for row in rows(search, study)[1:]] == ["1", "2", "0"], "and nothing is shown twice"
    page = write_results(search, study)[1]
    assert page is not None and "trial-001" in page.read_text()
