"""The example of `docs/algorithms.md` trains, but for the model's name word for word; the tables are complete."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.algorithms.support import OFFLINE, ONLINE
from verl.algorithms import registry

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
TITLES = ("Online algorithms", "Offline algorithms", "They learn")


def test_the_tables_are_complete() -> None:
    online, offline, learning = (TEXT.split(f"## {title}\n")[1].split("\n## ")[0] for title in TITLES)
    named = [set(re.findall(r"^\| `(\w+)` \| ", part, re.MULTILINE)) for part in (online, offline, learning)]
    assert named[0] >= set(ONLINE)
    assert named[1:] == [set(OFFLINE), {*ONLINE, *OFFLINE}]


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
