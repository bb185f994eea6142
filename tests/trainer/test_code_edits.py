"""The user's files are part of a run: an edit between two attempts is refused, or recorded."""

import json
import os
import sys
from pathlib import Path

import pytest

from verl._host import user_functions as loading
from verl._host.user_functions import load_function, user_files
from verl.errors import ConfigError
from verl.run.folder import Run, open_run


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("_imported", "_returned"):
        monkeypatch.setattr(loading, name, {})
    loading.elsewhere.clear()


def attempt(files: dict[str, str], **options: bool) -> Run:
    with open_run("runs", "grpo-1") as run:
        run.note_code(files, **options)
    return run


def test_an_edit_is_refused_until_it_is_accepted_and_then_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt({"rewards.py": "1", "episode.py": "1"})
    attempt({"rewards.py": "1", "episode.py": "1", "later.py": "1"})
    with pytest.raises(ConfigError, match=r"^rewards\.py has changed since this run began.*--fresh.*--accept-edits"):
        attempt({"rewards.py": "2", "later.py": "1"})
    with pytest.raises(ConfigError, match=r"later\.py has changed"):
        attempt({"rewards.py": "1", "later.py": "2"})
    run = attempt({"rewards.py": "2"}, accept_edits=True)
    assert "rewards.py has changed since the run began" in caplog.text
    kept = json.loads((run.path / "code.json").read_text())
    assert kept["files"] == {"rewards.py": "2", "episode.py": "1", "later.py": "1"}
    assert kept["edits"] == [{"attempt": 5, "file": "rewards.py", "before": "1", "after": "2"}]
    attempt({"rewards.py": "2"})  # which is the run's code now
    with open_run("runs", "grpo-1", fresh=True) as run:
        run.note_code({"rewards.py": "3"})
    assert json.loads((run.path / "code.json").read_text()) == {"files": {"rewards.py": "3"}, "edits": []}


@pytest.mark.parametrize("content", ["", "[]", '{"files": {"a": 1}, "edits": []}', '{"files": {}}'])
def test_a_damaged_record_is_returned(content: str) -> None:
    run = attempt({"a": "1"})
    (run.path / "code.json").write_text(content)
    with pytest.raises(ConfigError, match=r"code\.json is damaged"):
        attempt({"a": "1"})


def test_an_edit_of_equal_size_within_a_second_is_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (1, 2):
        (tmp_path / "mine.py").write_text(f"def f():\n    return {value}\n")
        os.utime(tmp_path / "mine.py", (10**9, 10**9))
        monkeypatch.setattr(loading, "user_modules", {})
        assert load_function("mine.py:f")() == value


def test_files_are_those_that_settings_name_as_imported_and_what_they_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    monkeypatch.delitem(sys.modules, "helper_of_edits", raising=False)
    before = user_files()  # of tests
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper_of_edits.py").write_text("WEIGHT = 1.0\n")
    (tmp_path / "own" / "not_imported.py").write_text("")
    source = tmp_path / "own" / "rewards.py"
    source.write_text("from helper_of_edits import WEIGHT\ndef f(texts): return [WEIGHT] * len(texts)\n")
    load_function(f"{source}:f")
    first = user_files()
    assert first.keys() - before.keys() == {"own/rewards.py", "own/helper_of_edits.py"}
    source.write_text("def f(texts): return [2.0] * len(texts)\n")  # what runs is what was imported
    assert user_files() == first
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(Exception, match="broken"):
        load_function("broken.py:f")
    assert user_files() == first
