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
PHONE = pytest.param(390, id="phone", marks=pytest.mark.slow)
WIDTHS = pytest.mark.parametrize("width", [pytest.param(1280, id="desktop"), PHONE])


def verl(*command: str, cwd: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
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
    assert browser.js("document.documentElement.scrollWidth") <= browser.width
    shown = "[...document.querySelectorAll('svg')].filter(e => e.getClientRects().length)"
    same = "Math.abs(e.viewBox.baseVal.width - e.clientWidth) <= 1"
    assert browser.js(f"{shown}.every(e => {same})"), "texts are of one size"
    small = "e.getClientRects().length && parseFloat(getComputedStyle(e).fontSize) < 12"
    assert browser.js(f"[...document.querySelectorAll('main *')].filter(e => {small}).length") == 0


def numbers(texts: list[str]) -> list[float]:
    return [float(text) for text in texts]


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_curves_come_with_the_headlines_first(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0] / "report.html", width)
    assert browser.texts("#groups h3")[0].lower() == "headlines"
    assert browser.texts("#groups .group:first-child .chart header span:first-child")[0] == "reward/mean"
    assert len(browser.texts("#groups .chart")) > 5
    curves = browser.js("Object.values(data.curves)")
    moving = {str(curve) for curve in curves if len({value for _, value in curve}) > 1}
    single = [curve for curve in curves if len(curve) == 1]
    lines = len(moving) + len(single)
    assert browser.js("document.querySelectorAll('#groups path.line').length") == lines, "each curve is drawn once"
    about = browser.js("document.querySelector('#groups .chart header span').title")
    assert about.startswith("reward/mean, reward\n") and "mean reward of the step's samples" in about
    assert any("actor" in text and "reward" in text for text in browser.texts("#groups .legend")), "shares of roles"
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
    fresh(browser, runs[0] / "report.html", width)
    assert browser.js("[...document.querySelectorAll('#step option')].map(e => e.textContent)") == ["1", "2", "3"]
    assert browser.texts("#found") == ["16 samples"] and len(browser.texts("#rows article")) == 16
    facts = browser.texts("#rows article header")[0]
    assert all(name in facts for name in ("advantage", "length 8", "finish length"))
    heads = browser.texts("#rows .pair > .prompt")
    assert len(heads) == 4 and all("What is" in text and "ground truth" in text for text in heads)
    assert browser.js(
        "[...document.querySelectorAll('#rows .pair')].every(e => e.querySelectorAll('article').length === 4)"
    )
    browser.choose("#sort", "reward, best first")
    assert len(browser.texts("#rows .pair")) == 4, "samples of a prompt stay together"
    browser.click("#together")
    assert len(browser.texts("#rows .pair")) == 16
    rewards = numbers(browser.texts("#rows .mark"))
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) > 1
    browser.choose("#which", "others")
    assert numbers(browser.texts("#rows .mark")) == [reward for reward in rewards if reward <= 0]
    browser.choose("#which", "all")
    word = browser.texts("#rows article .text")[0].split()[0]
    browser.choose("#find", word)
    assert 0 < len(browser.texts("#rows article")) <= 16
    assert all(word.lower() in text.lower() for text in browser.texts("#rows article"))
    browser.choose("#find", "no such text")
    assert browser.texts("#found") == ["0 samples"] and browser.texts("#rows article") == []
    browser.choose("#find", "")
    browser.choose("#step", "1")
    bars = "document.querySelectorAll('#histograms rect')"
    counted = browser.js(f"[...{bars}].map(e => Number(e.textContent.split(': ')[1])).reduce((a, b) => a + b)")
    assert counted == 2 * 16, "each sample is in a bin of both histograms"
    browser.click("#rows summary")
    assert browser.js("document.querySelector('#rows details').open"), "the whole prompt is a click away"
    check(browser)


@WIDTHS
def test_evaluation_samples_and_links(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0] / "report.html", width)
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
def test_tokens_with_their_numbers_are_a_click_away(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0] / "report.html", width)
    assert browser.texts("#rows .tokens") == []
    browser.click("#rows article .fold")
    assert browser.js("document.querySelectorAll('#rows .tokens span').length") == 8
    browser.click("#rows .tokens span")
    (facts,) = browser.texts("#rows .facts")
    assert all(name in facts for name in ("written by the policy", "advantage", "entropy", "mismatch"))
    assert 2 < float(facts.split("entropy ")[1].split(",")[0]) < 10, "of a model that has learned nothing"
    check(browser)


@WIDTHS
def test_curves_are_pointed_at_zoomed_and_scaled(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0] / "report.html", width)
    chart = "#groups .chart svg"
    browser.mouse(chart, ("mouseMoved", 0.2))
    values = browser.texts("#groups .chart header span:last-child")
    assert values[0].startswith("step 1: ") and sum(text.startswith("step 1: ") for text in values) > 3
    steps, last = "charts[0].drawn[0].raw.length", "charts[0].drawn[0].raw.at(-1)[0]"
    whole = browser.js(steps)
    browser.mouse(chart, ("mouseMoved", 0.5), ("mousePressed", 0.5), ("mouseMoved", 0.95), ("mouseReleased", 0.95))
    assert 0 < browser.js(steps) < whole and browser.texts("#unzoom")
    browser.click("#unzoom")
    assert browser.js(steps) == whole and not browser.texts("#unzoom")
    browser.choose("#axis", "time")
    assert browser.js(last) == browser.js("data.clock.at(-1)[1]")
    browser.choose("#axis", "tokens")
    assert browser.js(last) == browser.js("data.clock.at(-1)[2]") > 100
    browser.click("#log")
    assert 0 < browser.js("charts.filter(chart => chart.scale.isLog).length") < browser.js("charts.length")
    check(browser)


@WIDTHS
def test_a_page_that_reloads_itself_looks_as_before(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0] / "report.html", width)
    chosen = {"step": "2", "find": "e", "filter": "rew", "sort": "reward, best first", "before": "3"}

    def shown() -> list[object]:
        texts = [browser.texts(selector) for selector in ("#groups .group", "#rows article", "#count")]
        return [*texts, {name: browser.js(f"byId('{name}').value") for name in chosen}]

    for name, value in chosen.items():
        browser.choose(f"#{name}", value)
    browser.click("#theme")
    browser.click("#groups .fold")
    before, theme = shown(), browser.js("document.documentElement.dataset.theme")
    browser.reload()
    assert shown() == before and before[-1] == chosen
    assert browser.js("document.documentElement.dataset.theme") == theme is not None
    assert browser.js("document.querySelector('.group').classList.contains('folded')")
    check(browser)


def fresh(browser: Browser, page: Path, width: int) -> None:
    """The page as one sees it who has chosen nothing yet."""
    browser.open(page, width)
    browser.js("sessionStorage.clear(), localStorage.clear()")
    browser.reload()


@WIDTHS
def test_runs_side_by_side(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0].parents[2] / "comparison.html", width)
    assert browser.texts("h1") == ["2 runs"]
    assert any("optim.lr" in text for text in browser.texts("table th"))
    assert sorted(browser.texts("#legend button")) == ["■ A lr=0.01", "■ B lr=0.0001"]
    first = browser.texts(".chart header span:first-child")[0]
    assert first == "reward/mean"
    lines = "document.querySelector('.chart svg').querySelectorAll('path.line').length"
    assert browser.js(lines) == 2
    browser.click("#legend button")
    assert browser.js(lines) == 1
    browser.reload()
    assert browser.js(lines) == 1
    assert browser.js("document.documentElement.scrollHeight") < (9000 if width > 1000 else 20000)
    assert all(" to " in text and text.count("reward") == 1 for text in browser.texts(".results tr:has(a)"))
    links = browser.js("[...document.querySelectorAll('.results a')].map(e => decodeURIComponent(e.href))")
    if width > 760:
        browser.click(".results th")
        assert [text.split()[1] for text in browser.texts(".results tbody tr")] == ["B", "A"]
    assert sorted(links) == [(run / "report.html").resolve().as_uri() for run in runs]
    check(browser)


@WIDTHS
def test_answers_of_two_runs_to_one_prompt(browser: Browser, runs: list[Path], width: int) -> None:
    fresh(browser, runs[0].parents[2] / "comparison.html", width)
    assert browser.texts("#count") == ["48 problems"] and len(browser.texts("#pairs .pair")) == 20
    left, right = browser.texts("#pairs .pair:first-child article header span:first-child")
    assert left.startswith("A fast") and right.startswith("B slow") and left.endswith(", step 3")
    browser.choose("#left", "1")
    assert browser.texts("#pairs .pair:first-child article header span:first-child") == [right, right]
    browser.choose("#search", "no such text")
    assert browser.texts("#count") == ["0 problems"]
    check(browser)
