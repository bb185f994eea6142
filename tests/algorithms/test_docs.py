"""The example of `docs/algorithms.md` trains, but for the model's name word for word; the tables are complete."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from tests import forked
from tests.algorithms.support import OFFLINE, ONLINE
from verl.algorithms import algorithm_names, make_algorithm, registry

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
TITLES = ("Online algorithms", "Offline algorithms", "They learn")


def test_the_tables_are_complete() -> None:
    online, offline, learning = (TEXT.split(f"## {title}\n")[1].split("\n## ")[0] for title in TITLES)
    named = [set(re.findall(r"^\| `(\w+)` \| ", part, re.MULTILINE)) for part in (online, offline, learning)]
    assert named[0] >= set(ONLINE)
    assert named[1:] == [set(OFFLINE), {*ONLINE, *OFFLINE}]


@pytest.mark.slow
def test_the_example_trains(
    make_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    (example,) = re.findall(r"```python\n(import verl\n.*?)```", TEXT, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    exec(compile(example.replace('"gpt2"', repr(str(make_tiny("gpt2")))), "example", "exec"), {"__name__": "__main__"})
    rewards = [float(line) for line in capsys.readouterr().out.splitlines() if line.strip().startswith("-")]
    assert len(rewards) == 10


def test_each_algorithm_has_a_page_with_all_its_options() -> None:
    # In a process of its own: Python 3.11 cannot parse in two threads at a time, and tests before this one left some.
    code = "import algorithm_pages, json; print(json.dumps(algorithm_pages.pages()))"
    done = forked.run([sys.executable, "-c", code], cwd=ROOT / "scripts", check=True)
    pages = json.loads(done.stdout)
    own = [name for name in algorithm_names() if type(make_algorithm(name)).__module__.startswith("verl.")]
    assert sorted(pages) == own  # examples tried by this process before may have registered theirs
    for name, text in pages.items():
        listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        assert sorted(listed) == sorted(field.name for field in fields(type(make_algorithm(name))) if field.init), name
