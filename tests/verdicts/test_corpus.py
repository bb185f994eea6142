"""The corpus of maths verdicts is what it says, and no verdict gets worse than it was."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter

import pytest

from tests.verdicts.table import Counts, answers, count, given_back, ours, pairs, table

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
#: The most there may be. These numbers only fall.
WRONG_1, WRONG_0, ABSTAINED, NOT_ITSELF = 0, 3, 0, 0


def test_the_corpus_is_large_has_many_kinds_and_a_reason_for_each_verdict() -> None:
    corpus = pairs()
    assert Counter(pair.right for pair in corpus).most_common()[-1][1] >= 300
    assert {pair.right for pair in corpus} == {0, 1}
    assert len({pair.kind for pair in corpus if not pair.kind.startswith("response: ")}) >= 37
    assert len(answers()) >= 170
    assert all(pair.why and pair.abstain in ("", "ok") for pair in corpus)
    # Each pair stands once, so none has two verdicts.
    assert max(Counter((json.dumps(pair.answer), pair.response) for pair in corpus).values()) == 1


def test_counts_add_up_by_kind() -> None:
    corpus = [pair._replace(kind="odd" if place % 2 else "even") for place, pair in enumerate(pairs()[:8])]
    corpus[0] = corpus[0]._replace(abstain="ok")
    scores = [None, None, *(float(pair.right) for pair in corpus[2:6]), 1.0 - corpus[6].right, 1.0 - corpus[7].right]
    ones = sum(not pair.right for pair in corpus[6:])
    assert count(corpus, scores) == Counts(4, ones, 2 - ones, 1, 1)
    assert [line.split("|")[1:3] for line in table(corpus, scores).splitlines()[2:]] == [
        [" even ", " 4 "], [" odd ", " 4 "], [" all ", " 8 "]]  # fmt: skip


@pytest.mark.slow
@needs_math_verify
def test_verdicts_are_at_least_as_right_as_they_were() -> None:
    corpus = pairs()
    counts = count(corpus, ours([(pair.answer, pair.response) for pair in corpus]))
    assert counts.wrong_1 <= WRONG_1 and counts.wrong_0 <= WRONG_0 and counts.abstained <= ABSTAINED, counts


@pytest.mark.slow
@needs_math_verify
def test_an_answer_given_back_is_right_or_abstains() -> None:
    scores = ours([(answer, response) for answer in answers() for response in given_back(answer)])
    assert scores.count(0.0) <= NOT_ITSELF
