"""The report: self-contained, safe with hostile texts, and made from whatever a run left behind."""

import base64
import hashlib
import json
import re
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts import metric_meanings
from tests.trainer.pages import HOSTILE, Page
from verl.errors import DataError
from verl.report import page as report
from verl.report import reading
from verl.report.page import write_report
from verl.run.train import _LiveReport, _print_table


def write_samples(run, step, responses, rewards, prompts=None):
    (run / "completions").mkdir(exist_ok=True)
    count = len(responses)
    table = {
        "id": [f"eval/{i}" for i in range(count)],
        "prompt": prompts or ["1 + 1 ="] * count,
        "response": responses,
        "reward": rewards,
    }
    pq.write_table(pa.table(table), run / "completions" / f"step-{step:06d}.parquet")


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "grpo-tiny-abc"
    (run / "logs").mkdir(parents=True)
    rows = [{"step": s, "time": s * 2.0, "reward/mean": s / 10, "kl": 0.1} for s in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evals = [
        {"step": 0, "accuracy": 0.25, "low": 0.2, "high": 0.3},
        {"step": 5, "accuracy": 0.5, "low": 0.4, "high": 0.6},
    ]
    (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    write_samples(run, 0, ["3", "2"], [0.0, None])
    write_samples(run, 5, ["2", "2"], [1.0, 1.0])
    (run / "config.yaml").write_text("algorithm:\n  name: grpo\ntrainer:\n  seed: 7\n")
    summary = {"accuracy_before": 0.25, "accuracy_after": 0.5, "gain_low": 0.11, "gain_high": 0.38}
    summary |= {"rollout_tokens_per_second": 2101.4, "peak_memory_bytes": 3.1e9, "seconds": 548, "eval_problems": 400}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "environment.json").write_text(json.dumps({"torch": "2.13"}))
    (run / "logs" / "attempt-001.log").write_text("killed at step 3\n")
    return run


def page(run):
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_headline_numbers(run):
    text = page(run).text
    for expected in (
        "25.0 %",
        "50.0 %",
        "+25.0 points",
        "+11.0 to +38.0",
        "400 held-out",
        "2,101",
        "3.10 GB",
        "9 min 8 s",
    ):
        assert expected in text
    for expected in ("grpo-tiny-abc", "seed 7", "name: grpo", "2.13", "killed at step 3"):
        assert expected in text


def test_curves_and_samples_are_those_of_the_files(run):
    data = page(run).data
    assert data["curves"]["reward/mean"] == [[s, s / 10] for s in range(1, 6)]
    assert data["curves"]["eval/accuracy"] == [[0, 0.25], [5, 0.5]]
    assert "time" not in data["curves"]
    assert [sample["step"] for sample in data["samples"]] == [0, 5]
    assert data["samples"][0]["rows"] == [["eval/0", "1 + 1 =", "3", 0.0], ["eval/1", "1 + 1 =", "2", None]]


def test_the_page_needs_nothing_from_outside(run):
    tags = page(run).tags
    assert not {"link", "iframe", "object", "embed", "img"} & {tag for tag, _ in tags}
    for _, attributes in tags:
        assert "src" not in attributes
        assert ":" not in attributes.get("href", "#") and not attributes.get("href", "#").startswith("/")
    text = (run / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not a fetch


def test_only_its_own_script_may_run(run):
    found = page(run)
    (policy,) = (a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_hostile_texts_stay_texts(run):
    (run / "config.yaml").write_text("algorithm:\n  name: harmless\n")
    clean = [tag for tag, _ in page(run).tags]
    write_samples(run, 5, [HOSTILE, "2"], [1.0, 1.0], [HOSTILE, "x"])
    (run / "config.yaml").write_text(f"algorithm:\n  name: {HOSTILE}\n")
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "logs" / "attempt-001.log").write_text(HOSTILE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "reward/mean": 0.5, HOSTILE: 1.0}) + "\n")
    found = page(run)
    assert [tag for tag, _ in found.tags] == clean
    assert found.data["samples"][1]["rows"][0][1:3] == [HOSTILE, HOSTILE]
    assert found.data["curves"][HOSTILE] == [[6, 1.0]]


@pytest.mark.parametrize("name", sorted(file.name for file in report.ASSETS.glob("*.js")))
def test_scripts_build_no_markup_from_text(name):
    script = (report.ASSETS / name).read_text(encoding="utf-8")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert unsafe not in script


def test_damaged_files_are_left_out(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "reward/mean": NaN, "kl": 0.5}\n\xff\xfe\n[1]\n{"step": "x"}\n{"step": 7, "rewa')
    (run / "eval.jsonl").write_text('{"step": 0, "accuracy": NaN, "low": Infinity}\n')
    (run / "summary.json").write_text('{"accuracy_bef')
    (run / "environment.json").write_text("[" * 200_000)
    (run / "completions" / "step-000005.parquet").write_bytes(b"PAR1 torn")
    found = page(run)
    assert found.data["curves"]["kl"][-1] == [6, 0.5]
    assert len(found.data["curves"]["reward/mean"]) == 5
    assert found.data["evals"] == [{"step": 0, "accuracy": None, "low": None}]
    assert [sample["step"] for sample in found.data["samples"]] == [0]
    assert "No evaluation yet" in found.text
    assert "not finished" in found.text


def test_training_and_evaluation_of_one_step_are_both_kept(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "eval/reward": 0.75}) + "\n")
    curves = page(run).data["curves"]
    assert curves["reward/mean"][-1] == [5, 0.5]
    assert curves["eval/reward"] == [[5, 0.75]]


def test_a_run_without_accuracy_is_headed_by_its_reward(run):
    rows = [{"step": s, "headline": "reward", "reward": s / 10, "accuracy": None} for s in (0, 5)]
    (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"headline": "reward", "reward_before": 0.0, "reward_after": 0.5, "gain_low": 0.25, "gain_high": 0.75}
    (run / "summary.json").write_text(json.dumps(summary))
    text = page(run).text
    for expected in ("0.000", "0.500", "reward on held-out problems", "+0.500", "+0.250 to +0.750"):
        assert expected in text


def test_a_step_done_again_after_a_resume_counts_once(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 9.0}) + "\n")
    curve = page(run).data["curves"]["reward/mean"]
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5]
    assert curve[3] == [4, 9.0]


def test_one_file_is_enough(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    found = page(tmp_path)
    empty = {"clock": [[0, 0, 0]], "meanings": {}}
    assert {**found.data, "first": []} == {
        "first": [],
        "curves": {},
        "evals": [],
        "samples": [],
        "training": [],
        **empty,
    }


def test_steps_have_the_time_and_the_tokens_that_they_took(run):
    """Evaluations count, whether their row is a step's or their own."""
    rows = [
        {"step": 0, "time/evaluation": 5.0},
        {"step": 1, "time/step": 2.0, "rollout/tokens": 100, "train/tokens": 9},
    ]
    rows += [{"step": 2, "time/step": 1.5, "time/evaluation": 5.0, "rollout/tokens": 50}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert page(run).data["clock"] == [[0, 0, 0], [0, 5, 0], [1, 7, 100], [2, 13.5, 150]]


def test_metrics_say_what_they_mean(run):
    names = ["reward/mean", "task/a/reward/mean", "eval/task/a/reward", "reward/x/mean", "eval/response/cut", "my/own"]
    texts = report.meanings(names)
    assert texts["reward/mean"].startswith("mean reward of the step's samples") == ("my/own" not in texts)
    assert texts["task/a/reward/mean"] == texts["reward/mean"]
    assert texts["eval/task/a/reward"].startswith("of the held-out data")
    assert texts["reward/x/mean"].startswith("a component of the reward")
    assert texts["eval/response/cut"].startswith("share of responses that reached")
    assert page(run).data["meanings"].keys() >= {"reward/mean", "kl", "eval/accuracy"}


def test_the_page_says_what_the_docs_say():
    texts = metric_meanings.meanings(metric_meanings.PAGE.read_text(encoding="utf-8"))
    assert dict(json.loads((report.ASSETS / "metrics.json").read_text("utf-8"))) == texts, (
        "docs/metrics.md has changed: run scripts/metric_meanings.py"
    )


def write_tokens(run, step, lengths):
    lists = [["word"] * length for length in lengths], [[1] * length for length in lengths]
    numbers = [[0.123456] * length for length in lengths]
    table = {"response": ["x"] * len(lengths), "tokens/advantage": numbers, "tokens/entropy": [None] * len(lengths)}
    table |= dict(zip(("tokens/text", "tokens/mask"), lists, strict=True))
    pq.write_table(pa.table(table), run / "completions" / f"train-{step:06d}.parquet")


def test_tokens_with_their_numbers_are_those_of_the_latest_steps(run):
    long = reading.MAX_TOKENS // 2
    write_tokens(run, 1, [3])
    write_tokens(run, 2, [long])
    write_tokens(run, 3, [2, long - 2])
    first, second, third = (entry["rows"] for entry in page(run).data["training"])
    assert [len(row["tokens"]) for row in third + second] == [2, long - 2, long] and "tokens" not in first[0]
    assert third[0]["tokens"] == [["word", 1, 0.123, None, None]] * 2


def test_a_directory_of_no_run_is_refused(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="is no run directory"):
            write_report(directory)


@pytest.mark.slow
def test_large_runs_stay_small_pages(run):
    steps = reading.MAX_POINTS * 5 + 3
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "kl": {s % 2}}}\n' for s in range(steps)))
    write_samples(run, 0, ["a" * 100_000] * 1000, [1.0] * 1000)
    for step in range(10, 40):
        write_samples(run, step, ["a"], [1.0])
    data = page(run).data
    curve = data["curves"]["kl"]
    assert len(curve) <= reading.MAX_POINTS
    assert curve[-1][0] == steps - 1
    assert all(0.3 < value < 0.7 for _, value in curve[:-1])
    assert len(data["samples"]) <= reading.MAX_EVALS
    assert (data["samples"][0]["step"], data["samples"][-1]["step"]) == (0, 39)
    assert len(data["samples"][0]["rows"]) == reading.MAX_SAMPLES
    assert len(data["samples"][0]["rows"][0][2]) < reading.MAX_TEXT + 100


def write_training(run, step, count):
    names = ("prompt", "response", "finish", "ground_truth")
    table = {name: [f"{name} {row}" for row in range(count)] for name in names} | {"reward": [0.5] * count}
    table["question"] = [None] * (count - 1) + ["What?"]
    pq.write_table(pa.table(table), run / "completions" / f"train-{step:06d}.parquet")


@pytest.mark.parametrize(("steps", "rows"), [(30, 40), (reading.MAX_STEPS, 20), (reading.MAX_STEPS + 5, 2)])
def test_training_samples_of_every_step_are_there_or_what_is_left_out_is_said(run, steps, rows):
    for step in range(1, steps + 1):
        write_training(run, step, rows)
    training = page(run).data["training"]
    shown = [entry["step"] for entry in training]
    assert len(shown) == min(steps, reading.MAX_STEPS) and {1, steps} <= {*shown} and shown == sorted(shown)
    for entry in training:
        assert entry["of"] == rows and entry["files"] == steps
        assert len(entry["rows"]) == min(rows, reading.MAX_TRAINING // len(shown))
    if rows == 2:
        assert [row["question"] for row in training[0]["rows"]] == [None, "What?"]


@pytest.mark.parametrize(
    ("config", "chips"),
    [
        ("algorithm: {name: null}\ntrainer: {seed: 0}\nactor_rollout_ref: {model: {path: a/b}}\n", ["b", "seed 0"]),
        ("algorithm:\n  name: null\ntasks:\n- {name: x, type: grpo}\n- {name: y, type: rloo}\n", ["grpo", "rloo"]),
        ("critic:\n  model:\n    path: null\nactor_rollout_ref: {model: {path: m/}}\n", ["m"]),
        ("algorithm: [", []),
        ("", []),
    ],
)  # fmt: skip
def test_badges_say_what_is_set(run, config, chips):
    (run / "config.yaml").write_text(config)
    text = (write_report(run)).read_text()
    assert re.findall("<span class=chip>([^<]*)</span>", text) == ["not finished", *chips]


@pytest.mark.parametrize(
    ("name", "numbers", "text"),
    [
        ("reward", (0.03, 0.01, 0.05), "+0.030 (+0.010 to +0.050)"),
        ("reward", (0.0003, 0.0001, 0.0005), "+0.00030 (+0.00010 to +0.00050)"),
        ("accuracy", (0.25, 0.11, 0.38), "+25.0 points (+11.0 to +38.0)"),
        ("accuracy", (0.0312, 0.0308, 0.0317), "+3.120 points (+3.080 to +3.170)"),
        ("reward", (12.0, 7.0, 17.0), "+12.000 (+7.000 to +17.000)"),
        ("reward", (1.0, 1.0, 1.0), "+1.000 (+1.000 to +1.000)"),
        ("reward", (1.0, None, None), "+1.000"),
    ],
)
def test_a_gain_has_the_digits_of_its_interval(name, numbers, text):
    assert report.value_text(name, *numbers, "+") == text


def test_the_gain_is_that_of_its_interval_and_of_the_problems_with_a_score(run):
    """Over problems that have both values, not the difference of two means over others."""
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "gain": 0.125, "eval_problems": 8, "eval_unscored": 3}))
    text = page(run).text
    assert "+12.5 points" in text and "8 held-out problems (3 more have no such score)" in text


def test_the_end_table_has_the_gain_s_digits_and_whole_paths(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    summary = {"headline": "reward", "reward_before": 0.5, "reward_after": 0.53, "eval_problems": 7, "control": None}
    summary |= {"gain": 0.03, "gain_low": 0.01, "gain_high": 0.05, "eval_unscored": 1}
    summary |= {"train_tokens_per_second": 1.0, "peak_memory_bytes": 1e9, "seconds": 60.0}
    file = run / ("a" * 80) / "report.html"
    _print_table(summary, run, file)
    shown = capsys.readouterr().out
    assert "+0.030" in shown and "+0.010 to +0.050" in " ".join(shown.replace("│", " ").split())
    assert f"report: {file}\n" in shown


def test_an_older_report_is_replaced_whole(run):
    (run / "report.html").write_text("old")
    page(run)
    assert (run / "report.html").read_text(encoding="utf-8") != "old"
    assert [file.name for file in run.glob("*report*")] == ["report.html"]


def test_the_page_of_a_live_run_reloads_itself_until_it_ends(run, monkeypatch):
    monkeypatch.setattr("verl.run.train.REFRESH_SECONDS", 0)
    hook = _LiveReport(SimpleNamespace(path=run))
    hook(1, {})
    live = Page((run / "report.html").read_text())
    assert ("meta", {"http-equiv": "refresh", "content": str(report.REFRESH_SECONDS)}) in live.tags
    ended = Page(write_report(run).read_text())
    assert not any(attributes.get("http-equiv") == "refresh" for _, attributes in ended.tags)
