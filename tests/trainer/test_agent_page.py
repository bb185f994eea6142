"""Episodes of agents on the page of a run, in a real browser: conversations with masks, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

import verl
from tests.browser import PROGRAM, Browser
from verl.report.page import write_report

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (Debian: apt-get install chromium)")
PHONE = pytest.param(390, id="phone", marks=pytest.mark.slow)
WIDTHS = pytest.mark.parametrize("width", [pytest.param(1400, id="desktop"), PHONE])


def delegating(base_url: str, api_key: str, row: Any) -> Any:
    """Asks a judge in a conversation of its own, then goes on; a draft is not trained, and one prompt makes it fail."""
    chat = [{"role": "user", "content": row["prompt"]}]
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:

        def ask(messages: Any, **headers: str) -> Any:
            body = {"messages": messages, "max_tokens": 4}
            answer = client.post(f"{base_url}/chat/completions", json=body, headers=headers).raise_for_status().json()
            return answer["choices"][0]["message"]

        first = ask(chat)
        if row["prompt"] == "Fail":
            raise ValueError("no such shop")
        if row["prompt"] == "Alone":
            return float(sum(map(ord, first["content"])) % 7)
        ask([{"role": "system", "content": "Judge <b>it</b>."}, *chat], **{"X-Verl-Name": "judge"})
        ask([{"role": "user", "content": "A draft."}], **{"X-Verl-Train": "0"})
        last = ask([*chat, first, {"role": "user", "content": "Go on."}])
    return {"reward": float(sum(map(ord, last["content"])) % 7), "trajectories": {"judge": 0.25}}


@pytest.fixture(scope="module")
def page(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`report.html` of a run of one step: an agent with a judge, one without, and one that raises."""
    run = tmp_path_factory.mktemp("agents")
    episode = verl.Gateway(delegating, chat_template="hermes")
    # Over several epochs the trainer knows its log-probs before it updates, and so how far the engine's are off.
    actor = verl.Actor.from_pretrained(str(tiny), episode=episode, sampling={"max_new_tokens": 8}, epochs=2)
    trainer = verl.Trainer(actor, algorithm="grpo", n=2, log_dir=run)
    trainer.step(["Once", "Alone", "Fail"])
    trainer.close()
    trainer.logger.close()
    (run / "config.yaml").write_text("{}")
    return write_report(run)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@WIDTHS
def test_conversations_have_their_masks_and_episodes_are_together(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    episodes = browser.texts("#rows .episode")
    assert len(episodes) == 2 and all("one episode, 2 trajectories" in text for text in episodes)
    for text in episodes:
        assert text.count("trajectory judge") == text.count("trajectory_reward 0.25") == 1
        assert text.count("calls left out: 1 excluded") == 2
    articles = "[...document.querySelectorAll('#rows .episode:first-child article')]"
    kinds = browser.js(f"{articles}.map(e => [...e.querySelectorAll('.turns span')].map(s => s.className))")
    assert sorted(kinds) == [["trained"], ["trained", "masked", "trained"]]
    assert browser.texts("#rows .episode .turns .masked")[0].count("Go on.") == 1
    rewards = browser.texts("#rows .episode .mark")
    assert len(rewards) == 4 and rewards[0] == rewards[1] and rewards[2] == rewards[3]
    browser.click("#rows .episode details summary")
    assert browser.texts("#rows .episode details .text")[0].count("Judge <b>it</b>.") == 1
    check(browser)


@WIDTHS
def test_what_is_left_out_says_why(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    reasons = [text for text in browser.texts("#rows .why") if text.startswith("left out")]
    assert len(reasons) == 2 and all("left out: raised" in text and "no such shop" in text for text in reasons)
    browser.choose("#which", "none")
    assert len(browser.texts("#rows article")) == 2
    browser.choose("#which", "all")
    check(browser)


@WIDTHS
def test_each_token_says_whether_it_was_trained_and_how_far_the_engine_was_off(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width)
    browser.choose("#find", "Go on.")
    browser.click("#rows article .fold")
    masked, trained = (f"#rows .tokens span{name}" for name in (".masked", ":not(.masked)"))
    browser.click(trained)
    (facts,) = browser.texts("#rows .facts")
    assert "written by the policy" in facts and abs(float(facts.rsplit("mismatch ", 1)[1])) < 1e-4
    browser.click(masked)
    assert "not the policy's: masked" in browser.texts("#rows .facts")[0]
    check(browser)


def check(browser: Browser) -> None:
    assert browser.errors == []
    assert browser.js("document.documentElement.scrollWidth") <= browser.width
    browser.js("sessionStorage.clear(), localStorage.clear()")


def test_the_table_has_turns_in_order(page: Path) -> None:
    rows = pq.read_table(page.parent / "completions" / "train-000001.parquet").to_pylist()
    assert len(rows) == 8 and len({row["episode"] for row in rows}) == 6
    for row in rows:
        assert sum(turn["tokens"] for turn in row["turns"]) == row["length"]
        assert {turn["trained"] for turn in row["turns"]} <= {True, False}
        if row["left_out"]:
            assert row["reward"] is None and not row["turns"] and "no such shop" in row["abstain_reason"]
    counts = [json.loads(row["calls_left_out"]) for row in rows]
    assert counts.count({"excluded": 1}) == 4
