"""What README and docs tell a reader to do works as it is written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl.cli.main import app
from verl.config import load_config

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
        shown = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
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


@pytest.mark.parametrize("given", settings())
def test_settings_of_how_do_i_are_taken(given: str, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["init", str(tmp_path / "sums")])
    load_config(tmp_path / "sums" / "recipe.yaml", [one for one in shlex.split(given) if not one.startswith("--")])
