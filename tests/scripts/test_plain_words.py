"""The check of words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.plain_words import MOST_DIALECT, dialect, faults, named_faults

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "plain_words.py"


@pytest.mark.parametrize("text", ["was told", "_is_told = 1", "Told", "test_told_when", "it takes turns", "TOLD"])
def test_a_banned_word_is_found_in_texts_and_identifiers(text: str) -> None:
    (fault,) = faults(f"first line\n{text}\n")
    assert fault[0] == 2 and fault[1].lower() in text.lower() and fault[2]


@pytest.mark.parametrize("text", ["untold", "stole", "toldo", "recalls", "impatient"])
def test_a_part_of_another_word_is_none(text: str) -> None:
    assert not list(faults(text))


@pytest.mark.parametrize(
    "code", ["found = 1", "for at in x: pass", "def f(given): pass", "self.own = 1", "(made := 1)"]
)
def test_a_variable_that_says_nothing_is_found(code: str) -> None:
    ((line, name, better),) = named_faults(f"x = 0\n{code}\n")
    assert line == 2 and name in code and better


def test_other_uses_of_such_a_word_are_none() -> None:
    assert not list(named_faults("text = 'what was found'\nmatch.at(1)\nnot_found = own_rows = 0\n"))


def test_the_command_names_file_line_and_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "good.md").write_text("Plain words.\n")
    (tmp_path / "bad.py").write_text('x = 1\n"""What it was told."""\n')
    for name, code in (("good.md", 0), ("bad.py", 1)):
        command = [sys.executable, str(SCRIPT), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
    assert f"{tmp_path / 'bad.py'}:2: 'told': write reported" in done.stdout
    assert "1 banned words; the list is in scripts/plain_words.py" in done.stderr


def test_the_project_keeps_to_it() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_sentences_in_dialect_are_seen_and_their_number_only_falls(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""Rows of a batch. They are so many as it says."""\n\n\n'
        'def f():\n    """Add what is there.\n\n    Beside that of f. Stands for itself."""\n'
    )
    rows = [(sentence, names) for _, sentence, names in dialect(tmp_path)]
    assert rows == [
        ("Rows of a batch.", []),
        ("They are so many as it says.", ["so many", "as they say"]),
        ("Add what is there.", []),
        ("Beside that of f.", ["those of"]),
        ("Stands for itself.", []),
    ]
    assert sum(bool(names) for _, _, names in dialect(SCRIPT.parents[1] / "verl")) <= MOST_DIALECT
