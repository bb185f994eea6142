"""The pages of real runs in a real browser, at the width of a desktop and of a phone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.browser import PROGRAM, Browser

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (Debian: apt-get install chromium)")
REWARD = """
def vowels(responses, prompts):
    return [float(sum(c in "aeiou" for c in text)) - 2 for text in responses]
"""
SETTINGS = (
    "data.chat=false", "reward.path=vowels.py:vowels", "trainer.total_steps=3", "trainer.eval_every=3",
    "data.batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.max_new_tokens=8",
    "trainer.output_dir=runs",
)  # fmt: skip
WIDTHS = pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])


def verl(*command: str, cwd: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = forked.run([sys.executable, "-m", "verl", *command], cwd=cwd, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in the learning rate, and `report.html` of both in the folder above."""
    folder = tmp_path_factory.mktemp("browser")
    verl("init", "sums", "--model", str(tiny), cwd=folder)
    (folder / "sums" / "vowels.py").write_text(REWARD)
    for name, lr in (("slow", "1e-4"), ("fast", "1e-2")):
        settings = (*SETTINGS, f"trainer.run_name={name}", f"actor_rollout_ref.actor.optim.lr={lr}")
        verl("train", "recipe.yaml", *settings, cwd=folder / "sums")
    found = sorted(folder.glob("sums/runs/[sf]*-*"))
    verl("report", *map(str, found), cwd=folder)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def check(browser: Browser) -> None:
    """No error of a script, nothing that the page's policy refused, nothing beyond the right edge."""
    assert browser.errors == []
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")


def numbers(texts: list[str]) -> list[float]:
    return [float(text) for text in texts]


@WIDTHS
def test_curves_come_with_the_headlines_first(browser: Browser, runs: list[Path], width: int) -> None:
    browser.open(runs[0] / "report.html", width)
    assert browser.texts("#groups h3")[0].lower() == "headlines"
    assert browser.texts("#groups .group:first-child .chart header span:first-child")[0] == "reward/mean"
    drawn = len(browser.texts("#groups .chart"))
    assert drawn > 5 and browser.js("document.querySelectorAll('#groups path.line').length") == drawn
    browser.choose("#filter", "reward/mean")
    assert len(browser.texts("#groups .chart")) == 1
    before = browser.js("document.querySelector('#groups .chart svg').clientHeight")
    browser.click("#groups .chart header")
    assert browser.js("document.querySelector('#groups .chart svg').clientHeight") > before
    hidden = browser.js("[...document.querySelectorAll('#groups details th')].map(e => e.textContent)")
    assert "lr/actor" in hidden, "constant curves are in a list"
    check(browser)


@WIDTHS
def test_training_samples_are_filtered_and_sorted(browser: Browser, runs: list[Path], width: int) -> None:
    browser.open(runs[0] / "report.html", width)
    assert browser.js("[...document.querySelectorAll('#step option')].map(e => e.textContent)") == ["1", "2", "3"]
    assert browser.texts("#found") == ["16 samples"] and len(browser.texts("#rows article")) == 16
    facts = browser.texts("#rows article header")[0]
    assert all(name in facts for name in ("advantage", "length 8", "finish length", "ground truth"))
    browser.choose("#sort", "reward, best first")
    rewards = numbers(browser.texts("#rows .mark"))
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) > 1
    browser.choose("#which", "others")
    assert numbers(browser.texts("#rows .mark")) == [reward for reward in rewards if reward <= 0]
    browser.choose("#which", "all")
    word = browser.texts("#rows article > .text")[0].split()[0]
    browser.choose("#find", word)
    assert 0 < len(browser.texts("#rows article")) <= 16
    assert all(word.lower() in text.lower() for text in browser.texts("#rows article"))
    browser.choose("#find", "no such text")
    assert browser.texts("#found") == ["0 samples"] and browser.texts("#rows article") == []
    browser.choose("#find", "")
    browser.choose("#step", "0")
    bars = "document.querySelectorAll('#histograms rect')"
    counted = browser.js(f"[...{bars}].map(e => Number(e.textContent.split(': ')[1])).reduce((a, b) => a + b)")
    assert counted == 2 * 16, "each sample is in a bin of both histograms"
    browser.click("#rows summary")
    assert browser.js("document.querySelector('#rows details').open"), "the whole prompt is a click away"
    check(browser)


@WIDTHS
def test_evaluation_samples_and_links(browser: Browser, runs: list[Path], width: int) -> None:
    browser.open(runs[0] / "report.html", width)
    pairs = len(browser.texts("#pairs .pair"))
    assert pairs == 20
    browser.click("#more")
    assert len(browser.texts("#pairs .pair")) > pairs
    browser.choose("#change", "better")
    count = int(browser.texts("#count")[0].split()[0])
    browser.choose("#change", "all")
    assert count < int(browser.texts("#count")[0].split()[0])
    command = next(text for text in browser.texts("#settings code") if text.startswith("verl export"))
    assert str(runs[0].name) in command
    links = browser.js("[...document.querySelectorAll('#settings a')].map(e => e.getAttribute('href'))")
    assert links and all((runs[0] / link).exists() for link in links)
    theme = browser.js("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.js("getComputedStyle(document.body).backgroundColor") != theme
    check(browser)


@WIDTHS
def test_runs_side_by_side(browser: Browser, runs: list[Path], width: int) -> None:
    browser.open(runs[0].parents[2] / "comparison.html", width)
    assert browser.texts("h1") == ["2 runs"]
    assert any("optim.lr" in text for text in browser.texts("table th"))
    first = browser.texts(".chart header span:first-child")[0]
    assert first == "reward/mean"
    assert browser.js("document.querySelector('.chart svg').querySelectorAll('path[stroke]').length") == 2
    check(browser)
