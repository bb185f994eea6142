"""CodeBLEU against numbers worked out by hand, and on what is no program."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import verl
from verl.errors import ConfigError, DataError
from verl.rewards.codebleu import codebleu
from verl.rewards.source import run_reward

ADD = "def add(a, b):\n    c = a + b\n    return c\n"


def test_a_program_is_all_like_itself_and_under_other_names_like_it_in_syntax_and_flow() -> None:
    assert codebleu(ADD, ADD) == dict.fromkeys(("score", "ngrams", "weighted_ngrams", "syntax", "dataflow"), 1.0)
    renamed = codebleu(ADD.replace("a", "x").replace("b", "y").replace("xdd", "add"), ADD)
    assert renamed["syntax"] == renamed["dataflow"] == 1.0 and renamed["ngrams"] < 1


def test_numbers_by_hand() -> None:
    # Words "x = 1" and "x = 2": of single words two of three match, of pairs one of two, of triples none (0.1 of one).
    found = codebleu("x = 1", "x = 2")
    assert found["ngrams"] == pytest.approx((2 / 3 * 1 / 2 * 0.1) ** (1 / 3))
    assert found["weighted_ngrams"] == pytest.approx(found["ngrams"])  # no keyword: all weights are 0.2
    assert found["syntax"] == 1.0 and "dataflow" not in found
    assert found["score"] == pytest.approx((2 * found["ngrams"] + 1) / 3)
    # "return" weighs 1 and the other word 0.2: 1 of 1.2.
    assert codebleu("return a", "return b")["weighted_ngrams"] == pytest.approx((1 / 1.2 * 0.1) ** (1 / 2))
    # Of the pairs c<-a, c<-b, d<-c of the reference, the program has the first two.
    flow = codebleu("a = b = 1\nc = a + b", "a = b = 1\nc = a + b\nd = c")["dataflow"]
    assert flow == pytest.approx(2 / 3)
    short = codebleu("x = 1", "x = 1\ny = 2\nz = 3")["ngrams"]
    assert short == pytest.approx(math.exp(1 - 9 / 3))  # all that is there matches, and two thirds are missing


@pytest.mark.parametrize("program", ["", "def (", "\x00", "((((" * 500, "-" * 20000 + "1", "x = '''", "é ü"])
def test_what_is_no_program_scores_low_and_fails_nothing(program: str) -> None:
    found = codebleu(program, ADD)
    assert 0 <= found["score"] < 0.3 and found["syntax"] < 0.3


def test_as_a_reward_of_a_task() -> None:
    reward = verl.Reward("code_evaluator", evaluator="codebleu", timeout=5)
    rows = [
        {"prompt": "Add.", "response": f"Here:\n```python\n{ADD}```", "reference": ADD},
        {"prompt": "Add.", "response": "I cannot.", "reference": ADD},
        {"prompt": "Add.", "response": "x", "reference": None},
    ]
    found = run_reward(reward.source, verl.Batch.from_rows(rows)).as_batch()
    assert found["reward"][0] == 1.0 and found["reward/syntax"][0] == 1.0
    assert found["reward"][1] < 0.2 and found["reward"][2] is None
    with pytest.raises(ConfigError, match="evaluator is tests or codebleu, not 'bleu'"):
        verl.Reward("code_evaluator", evaluator="bleu")
    with pytest.raises(ConfigError, match="sum to 1"):
        verl.Reward("code_evaluator", evaluator="codebleu", weights=[1, 1, 1, 1])


def test_a_reward_model_by_name_is_the_reward_model(tiny: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    texts = [("Why?", "Because."), ("Who?", "I.")]
    named, plain = verl.Reward("rm_hf", model_name=str(tmp_path), device="cpu"), verl.Reward(model=str(tmp_path))
    assert named.get_reward(texts)["reward"] == plain.get_reward(texts)["reward"]
    assert verl.Reward("rm_hf", model_name=str(tmp_path), dtype="int4").get_reward(texts)["reward"][0] is not None
    with pytest.raises(ConfigError, match="'rm_hf' needs model_name"):
        verl.Reward("rm_hf")


def test_workers_call_it_as_this_process_does() -> None:
    from verl.batch import Batch
    from verl.rewards.calls import ThreadCaller
    from verl.rewards.make import make_reward

    batch = Batch.from_rows([{"response": f"```python\n{text}```", "reference": ADD} for text in (ADD, "x = 1\n")])
    here, there = (run_reward(make_reward("code", evaluator="codebleu", **options), batch)
                   for options in ({}, {"workers": ThreadCaller}))  # fmt: skip
    assert there.reward == here.reward and here.reward[0] == 1.0


def test_texts_and_pairs_are_scored_as_they_are() -> None:
    reward = verl.Reward(
        lambda responses, prompts: [len(r) + 10 * len(p) for r, p in zip(responses, prompts, strict=True)]
    )
    assert reward.get_reward(["a", "bb"])["reward"] == [1.0, 2.0]
    assert reward.get_reward([("x", "a"), ("", "bb")])["reward"] == [11.0, 2.0]
    for wrong in ("text", [1, 2], [("a", "b", "c")], 3):
        with pytest.raises(DataError, match="a list of texts, or a list of"):
            reward.get_reward(wrong)
