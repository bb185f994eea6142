"""Several runs on one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

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
    assert [group.names for group in groups] == [["a", "b"], ["<c>"]]
    assert differing(groups) == ["actor.optim.lr"]
    assert metrics_of(groups) == ["reward/mean"]  # and not the one that never changes
    curve = spread([curves["reward/mean"] for curves in groups[0].curves])
    assert curve == [(1, pytest.approx(0.1), 0.0, 0.2), (2, pytest.approx(0.3), 0.2, 0.4), (3, 0.5, 0.4, 0.6)]


def test_the_page_has_a_band_for_seeds_and_no_markup_of_a_name(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "out.html").read_text()
    assert "&lt;c&gt;" in page and "<c>" not in page and "<script" not in page
    assert "lr=1e-05 (2 runs)" in page and "lr=1e-06" in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    assert svg.count("Z'") == 1 and svg.count("stroke-width") == 2


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
    assert [group.names for group in groups] == [["a", "b"], ["<c>"], ["script-1"], ["script-2"]]
    page = write_comparison(runs, tmp_path / "out.html").read_text()
    assert "script-1" in page and "lr=None" not in page


def test_a_run_counts_once_however_often_it_is_named(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("a")
    (one,) = grouped([tmp_path / "latest", *runs[:2], tmp_path / "." / "b"])
    assert one.names == ["a", "b"]
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
