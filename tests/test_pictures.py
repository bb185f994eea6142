"""Each picture of README and docs is made by a command, shown by a page, and small."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT

spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
assert spec is not None and spec.loader is not None
pictures = sys.modules["pictures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)
FILES = sorted((ROOT / "docs" / "pictures").iterdir())


def test_each_picture_is_named_by_the_script_and_shown_by_a_page() -> None:
    assert {file.name for file in FILES} == {*pictures.DRAWN, *pictures.OF_A_RUN}
    shown = set()
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\((\S+?)\)", page.read_text("utf-8")):
            assert words, f"{page.name} does not say what {target} shows"
            shown.add((page.parent / target).resolve())
    assert shown == set(FILES)


@pytest.mark.quick("learning.svg", "architecture.svg", "hybrid_engine.svg")  # the planner draws the others
@pytest.mark.parametrize("name", pictures.DRAWN)
def test_pictures_are_what_the_script_draws(name: str) -> None:
    assert (pictures.FOLDER / name).read_text("utf-8") == pictures.DRAWN[name](), "run: python scripts/pictures.py"


def test_what_learned_is_apart_from_what_must_not() -> None:
    rows = pictures.gains(pictures.LOG.read_text("utf-8"))
    assert len(rows) == 6 and min(row.low for row in rows[:3]) > max(row.high for row in rows[3:])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_picture_is_small_and_its_text_is_not(file: Path) -> None:
    assert file.stat().st_size <= 200_000
    if file.suffix == ".svg":
        text = file.read_text("utf-8")
        assert all(int(size) >= 12 for size in re.findall(r'font-size="(\d+)"', text))
        assert 'fill="white"/>' in text, "a card under it, for dark pages"
        width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', text).groups())  # type: ignore[union-attr]
        places = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)"', text)
        assert all(0 < float(x) < width and 0 < float(y) < height for x, y in places)
        for x, words in re.findall(r'<text x="([\d.]+)" [^>]*text-anchor="start"[^>]*>([^<]*)<', text):
            assert float(x) + 6.7 * len(words) < width, f"{words} is cut off"
