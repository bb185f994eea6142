"""Several runs on one page."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.trainer.pages import HOSTILE, Page
from verl.errors import DataError
from verl.report.compare import differing, grouped, metrics_of, spread, write_comparison


def make_run(folder: Path, name: str, *, lr: float, seed: int, rewards: list[float]) -> Path:
    run = folder / name
    run.mkdir()
    config = {"actor": {"optim": {"lr": lr}}, "trainer": {"seed": seed, "run_name": name, "output_dir": str(folder)}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": i + 1, "reward/mean": value, "batch/rows": 8} for i, value in enumerate(rewards)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path, "a", lr=1e-5, seed=0, rewards=[0.0, 0.2, 0.4]),
        make_run(tmp_path, "b", lr=1e-5, seed=1, rewards=[0.2, 0.4, 0.6]),
        make_run(tmp_path, "<c>", lr=1e-6, seed=0, rewards=[0.1, 0.1]),
    ]


def test_runs_that_differ_in_the_seed_alone_are_one_line(runs: list[Path]) -> None:
    groups = grouped(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b"], ["<c>"]]
    assert differing(groups) == ["actor.optim.lr"]
    assert metrics_of(groups) == ["reward/mean"]  # and not the one that never changes
    curve = spread([curves["reward/mean"] for curves in groups[0].curves])
    assert curve == [(1, pytest.approx(0.1), 0.0, 0.2), (2, pytest.approx(0.3), 0.2, 0.4), (3, 0.5, 0.4, 0.6)]


def page_of(runs: list[Path], file: Path) -> Page:
    return Page(write_comparison(runs, file).read_text())


def test_the_page_has_a_band_for_seeds_and_no_markup_of_a_name(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(runs, tmp_path / "out.html")
    assert "<c>" in page.text and "c" not in {tag for tag, _ in page.tags}
    assert [line["label"] for line in page.data["lines"]] == ["lr=1e-05 (2 runs)", "lr=1e-06"]
    (first, band), (second, line) = page.data["curves"]["reward/mean"]
    assert (first, second) == (0, 1)
    assert band[0] == [1, 0.1, 0, 0.2] and line == [[1, 0.1], [2, 0.1]]


def test_hostile_texts_stay_texts(runs: list[Path], tmp_path: Path) -> None:
    for run in runs:
        write_answers(run, ["harmless"], ["harmless"], [1.0])
    clean = page_of(runs, tmp_path / "out.html")
    for number, run in enumerate(runs):
        write_answers(run, [HOSTILE], [HOSTILE], [1.0])
        settings = yaml.safe_load((run / "config.yaml").read_text())
        settings["algorithm"] = {"name": f"{HOSTILE}{number // 2}", HOSTILE: number // 2}
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        (run / "summary.json").write_text(json.dumps({"state": HOSTILE}))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9, HOSTILE: number}) + "\n" + json.dumps({"step": 10, HOSTILE: 7}) + "\n")
    page = page_of(runs, tmp_path / "out.html")
    assert HOSTILE in page.data["curves"] and HOSTILE in page.data["answers"]["prompts"]
    counts = [Counter(tag for tag, _ in tags) for tags in (clean.tags, page.tags)]
    rows = {"tr": 2, "th": 2, "td": 2 * 2}  # two settings more that differ
    assert {tag: counts[1][tag] - counts[0][tag] for tag in counts[1] | counts[0]} == {
        **dict.fromkeys(counts[0], 0),
        **rows,
    }
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    (policy,) = (a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_labels_name_every_setting_in_which_runs_differ(tmp_path: Path) -> None:
    for name, algorithm, rate, path in (("a", "grpo", 1e-5, "x/one.py"), ("b", "rloo", 1e-6, "x/two.py")):
        run = make_run(tmp_path, name, lr=rate, seed=0, rewards=[0.0, 1.0])
        settings = {"rank": 8, "algorithm": {"name": algorithm}, "reward": {"path": path}, "critic": {"lr": rate}}
        content = yaml.safe_load((run / "config.yaml").read_text()) | settings
        (run / "config.yaml").write_text(yaml.safe_dump(content))
    page = page_of([tmp_path / "a", tmp_path / "b"], tmp_path / "out.html")
    label = page.data["lines"][0]["label"]
    assert label == "algorithm=grpo, optim.lr=1e-05, critic.lr=1e-05, reward.path=x/one.py"
    assert page.data["lines"][1]["label"].startswith("algorithm=rloo, optim.lr=1e-06")


def test_labels_of_runs_that_differ_in_very_much_name_the_first_settings(tmp_path: Path) -> None:
    for name, rate in (("a", 1e-5), ("b", 1e-6)):
        run = make_run(tmp_path, name, lr=rate, seed=0, rewards=[0.0, 1.0])
        content = yaml.safe_load((run / "config.yaml").read_text()) | {"data": {f"k{i}": name for i in range(9)}}
        (run / "config.yaml").write_text(yaml.safe_dump(content))
    page = page_of([tmp_path / "a", tmp_path / "b"], tmp_path / "out.html")
    label = page.data["lines"][0]["label"]
    assert label.count("=") == 6 and label.endswith(" and 4 more")
    assert all(f"data.k{i}" in (tmp_path / "out.html").read_text() for i in range(9)), "the table has all"


def write_answers(run: Path, prompts: list[str], responses: list[str], rewards: list[float | None]) -> None:
    (run / "completions").mkdir(exist_ok=True)
    columns = {"id": [str(row) for row in range(len(prompts))], "prompt": prompts, "response": responses}
    pq.write_table(pa.table({**columns, "reward": rewards}), run / "completions" / "step-000003.parquet")


def test_answers_of_two_runs_to_a_prompt(runs: list[Path], tmp_path: Path) -> None:
    write_answers(runs[0], ["1+1", "2+2", "1+1"], ["2", "5", "3"], [1.0, 0.0, None])
    write_answers(runs[2], ["2+2", "3+3"], ["4", "6"], [1.0, 1.0])
    answers = page_of(runs, tmp_path / "out.html").data["answers"]
    assert answers["prompts"] == ["1+1", "2+2", "3+3"]
    assert [(run["label"], run["step"], run["rows"]) for run in answers["runs"]] == [
        ("A a", 3, [[0, 0, "2", 1.0], [1, 0, "5", 0.0], [0, 1, "3", None]]),
        ("B <c>", 3, [[1, 0, "4", 1.0], [2, 0, "6", 1.0]]),
    ]


def test_results_have_intervals_and_links(runs: list[Path], tmp_path: Path) -> None:
    for run, gain in zip(runs[:2], (0.2, 0.3), strict=True):
        rows = [{"step": s, "accuracy": 0.5 + s * gain, "low": 0.4 + s * gain, "high": 0.6 + s * gain} for s in (0, 1)]
        (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {"headline": "accuracy", "gain": gain, "gain_low": gain - 0.1, "gain_high": gain + 0.1}
        (run / "summary.json").write_text(json.dumps({**summary, "state": "finished"}))
        (run / "report.html").touch()
    (tmp_path / "pages").mkdir()
    page = page_of(runs, tmp_path / "pages" / "out.html")
    for text in (
        "accuracy 50.0 % (40.0 to 60.0)",
        "70.0 % (60.0 to 80.0)",
        "+20.0 points (+10.0 to +30.0)",
        "finished",
    ):
        assert text in page.text
    assert "+25.0 points (+20.0 points to +30.0 points over 2 runs)" in page.text
    links = [attributes["href"] for tag, attributes in page.tags if attributes.get("class") == "link"]
    assert links == ["../a/report.html", "../b/report.html"]


@pytest.mark.slow
def test_many_runs_stay_a_small_page(tmp_path: Path) -> None:
    values = [step * 0.001234567 for step in range(2000)]
    runs = [make_run(tmp_path, f"run-{n}", lr=n * 1e-6, seed=0, rewards=values) for n in range(120)]
    for run in runs:
        write_answers(run, [f"prompt {row}" for row in range(300)], ["y"] * 300, [1.0] * 300)
    page = page_of(runs, tmp_path / "out.html")
    assert sum(len(points) for drawn in page.data["curves"].values() for _, points in drawn) <= 200_000
    assert sum(len(run["rows"]) for run in page.data["answers"]["runs"]) <= 4000
    assert page.data["lines"][27]["key"] == "AB"


def test_what_is_no_run_is_named(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no metrics of a run"):
        write_comparison([*runs, tmp_path / "empty"], tmp_path / "out.html")


def test_a_run_without_settings_is_a_line_of_its_own(runs: list[Path], tmp_path: Path) -> None:
    for name in ("script-1", "script-2"):
        run = make_run(tmp_path, name, lr=1.0, seed=0, rewards=[0.0, 1.0])
        (run / "config.yaml").unlink()
        runs.append(run)
    groups = grouped(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b"], ["<c>"], ["script-1"], ["script-2"]]
    page = page_of(runs, tmp_path / "out.html").text
    assert "script-1" in page and "lr=None" not in page and "lr=null" not in page


def test_a_run_counts_once_however_often_it_is_named(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("a")
    (one,) = grouped([tmp_path / "latest", *runs[:2], tmp_path / "." / "b"])
    assert [run.name for run in one.runs] == ["a", "b"]
    assert spread([curves["reward/mean"] for curves in one.curves])[0][1] == pytest.approx(0.1)


def test_long_runs_of_unequal_length_are_compared_step_by_step(tmp_path: Path) -> None:
    """Thinned apart, the longer one would have other steps, so that no step had both."""
    made = [
        make_run(tmp_path, "low", lr=1e-5, seed=0, rewards=[0.0] * 2000),
        make_run(tmp_path, "high", lr=1e-5, seed=1, rewards=[1.0] * 2600),
    ]
    (group,) = grouped(made)
    curve = spread([curves["reward/mean"] for curves in group.curves])
    assert len(curve) <= 2000
    assert {tuple(point[1:]) for point in curve if point[0] <= 2000} == {(0.5, 0.0, 1.0)}
    assert {tuple(point[1:]) for point in curve if point[0] > 2001} == {(1.0, 1.0, 1.0)}


def test_the_folder_of_the_page_is_made(runs: list[Path], tmp_path: Path) -> None:
    assert write_comparison(runs, tmp_path / "missing" / "folder" / "page.html").exists()
