"""`outcomes.txt` says what became of TRL's own tests with the import changed (`scripts/trl_tests.py`)."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIVE = ("GRPO", "DPO", "SFT", "KTO", "Reward")
#: What an error is called where a name is missing, or something breaks.
BROKEN = ("AttributeError", "ImportError", "KeyError", "NameError", "TypeError", "IndexError", "RuntimeError")

TEXT = """
from verl.trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import Collator

class TestCollator:
    def test_pads(self):
        assert Collator()([1])

class TestTrainer:
    def _make(self):
        return SFTTrainer(SFTConfig())
    def test_trains(self):
        assert self._make().train()
    def test_logs(self):
        assert self._make()._logs
    def test_transformers(self):
        assert transformers.x
"""


def outcomes() -> list[tuple[str, str, str]]:
    """Trainer, outcome, reason."""
    lines = (ROOT / "tests" / "trl" / "outcomes.txt").read_text().splitlines()
    parts = [line.split(": ", 2) for line in lines]
    return [(test.partition(" ")[0], what, "".join(why)) for test, what, *why in parts]


def test_most_of_them_pass_and_none_fails_for_a_name() -> None:
    passed = Counter(trainer for trainer, what, _ in outcomes() if what == "passed")
    assert sum(passed[trainer] for trainer in FIVE) >= 293 and passed["RLOO"] >= 40, passed
    assert not [row for row in outcomes() if row[1] == "failed" and row[2].startswith(BROKEN)]
    assert all(why for _, what, why in outcomes() if what != "passed")


def test_what_tests_the_insides_of_trl_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import trl_tests

    (tmp_path / "test_sft_trainer.py").write_text(TEXT)
    assert trl_tests.insides(tmp_path / "test_sft_trainer.py", "verl.trl") == {
        "TestCollator::test_pads": "trl.trainer.sft_trainer Collator",
        "TestTrainer::test_logs": "_logs",
        "TestTrainer::test_transformers": "no trainer",
    }
    trl_tests.make_data(tmp_path)
    row = (tmp_path / "zen" / "conversational_preference" / "test.jsonl").read_text().splitlines()[0]
    assert (
        '"chosen": [{"role": "assistant"' in row
        and "- config_name: standard_preference" in (tmp_path / "zen" / "README.md").read_text()
    )
    sys.modules.pop("trl_tests")
