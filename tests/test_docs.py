"""What README and docs tell a reader to do works as it is written."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.agent_packages import openai_package
from tests.algorithms import plain_episodes
from verl.algorithms import algorithm_names, make_algorithm
from verl.cli.main import app
from verl.config import describe, load_config
from verl.config.other_names import NAMES

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_COMMAND = re.compile(r"(?:^|`|-m )verl (\w+)([^`\n#]*)", re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, part = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if part:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in map(anchor, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_are_there(page: Path) -> None:
    runner = CliRunner()
    for command, rest in _COMMAND.findall(page.read_text(encoding="utf-8")):
        words = [command, *([rest.split()[0]] if command == "agent" else [])]
        shown = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert shown.exit_code == 0, f"{page.name}: verl {command}"
        for option in re.findall(r"(?<!\S)--[\w-]+", rest):
            assert option in shown.stdout, f"{page.name}: verl {command} has no {option}"


def settings() -> list[str]:
    text = (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8")
    lines = [
        line.partition("  #")[0]
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    return [line.partition("verl train recipe.yaml")[2].strip() for line in lines if "verl train recipe.yaml" in line]


def test_settings_that_pages_name_are_there() -> None:
    """`section.key` or `section.key=value` in a page; below `algorithm` an option of some algorithm."""
    keys = {key.path for key in describe()} | set(NAMES)
    options = {field.name for name in algorithm_names() for field in fields(type(make_algorithm(name)))}
    for page in (ROOT / "docs" / name for name in ("faq.md", "metrics.md", "debugging.md")):
        for found in re.findall(
            r"`((?:trainer|data|algorithm|rollout|actor_rollout_ref)\.[\w.]+)", page.read_text("utf-8")
        ):
            name = f"actor_rollout_ref.{found}" if found.startswith("rollout.") else found
            is_option = name.startswith("algorithm.") and name.partition(".")[2] in options
            assert name in keys or is_option, f"{page.name} names {found}"


@pytest.mark.parametrize("given", settings())
def test_settings_of_how_do_i_are_taken(given: str, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["init", str(tmp_path / "sums")])
    load_config(tmp_path / "sums" / "recipe.yaml", [one for one in shlex.split(given) if not one.startswith("--")])


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_agent_of_the_tutorial_is_trained(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, in order; the reward is another one, as a model of random weights says no price."""
    pytest.importorskip("aiohttp")
    names: dict[str, Any] = {"__name__": "shop"}
    monkeypatch.chdir(tmp_path)
    price, other = 'PRICES[row["item"]] in (message.content or "")', 'len(message.content or "") % 2'
    with openai_package():
        agent, training = python_blocks("agents.md")
        assert agent.count(price) == 1
        exec(agent.replace(price, other), names)
        exec(training.replace("models/SmolLM2-135M-Instruct", str(tiny)), names)
    assert names["trainer"].steps == 2 and (tmp_path / "runs" / "shop" / "metrics.jsonl").exists()


def test_the_page_of_semantics_has_the_code_of_the_reference() -> None:
    *quoted, example = python_blocks("agent_semantics.md")
    source = Path(plain_episodes.__file__).read_text(encoding="utf-8")
    assert len(quoted) == 4 and all(block in source for block in quoted)
    names = dict(vars(plain_episodes))
    exec(example, names)
    episodes = names["episodes"]
    advantages = plain_episodes.advantages("dr_grpo", episodes)
    assert advantages == {("a", 0): 0.5, ("a", 1): 0.5, ("a", 2): 0.5, ("b", 3): -0.5}
    for mode, first, second in (("token-mean", 1 / 4, 1 / 4), ("seq-mean-token-mean", 1 / 6, 1 / 2)):
        weights = plain_episodes.weights(mode, episodes, [*advantages])
        assert [*weights.values()] == [first] * 3 + [second]
