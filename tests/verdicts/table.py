"""How many of the corpus's maths verdicts are right, by kind: ours, and math-verify alone beside it.

    python -m tests.verdicts.table            # prints the table
    python -m tests.verdicts.table --wrong    # and each pair whose verdict of ours is wrong or missing

The corpus is `maths/*.jsonl`, one pair a line: the `answer` of a row, a `response` to it, 1 or 0 in `right`, its
`kind`, and in `why` what distinguishes the two. Where abstaining is as good a verdict, `abstain` is "ok". math-verify
gets the row's answer in a box, and the response as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import verl

CORPUS = Path(__file__).parent / "maths"
#: How an answer is given back as a response.
FORMS = {
    "bare": "{}",
    "sentence": "The answer is {}.",
    "####": "It follows step by step.\n#### {}",
    "box": "Hence \\boxed{{{}}}",
    "bold": "The answer: **{}**",
    "heading": "#### Final answer\n\n{}",
}


class Pair(NamedTuple):
    """A row's answer, a response, and the right verdict."""

    kind: str
    answer: Any
    response: str
    right: int
    why: str
    abstain: str = ""


def pairs() -> list[Pair]:
    """The corpus, in the order of its files."""
    lines = (line for file in sorted(CORPUS.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines())
    return [Pair(**json.loads(line)) for line in lines]


def answers() -> list[Any]:
    """The rows' answers, each once."""
    return list({json.dumps(pair.answer): pair.answer for pair in pairs()}.values())


def ours(rows: Sequence[tuple[Any, str]]) -> list[float | None]:
    """The reward `math` of (answer, response); None: it abstains."""
    reward = verl.Reward("math", max_failure_rate=1.0)
    scores: list[float | None] = [None] * len(rows)
    try:
        # A column of a batch has values of one type.
        for kind in {type(answer) for answer, _ in rows}:
            places = [place for place, (answer, _) in enumerate(rows) if type(answer) is kind]
            batches = [places] if kind is str else [[place] for place in places]
            for batch in batches:
                columns = [{"answer": rows[place][0], "response": rows[place][1]} for place in batch]
                found = reward.get_reward(verl.Batch.from_rows(columns))["reward"]
                for place, score in zip(batch, found, strict=True):
                    scores[place] = score
    finally:
        reward.close()
    return scores


def library(rows: Sequence[tuple[Any, str]]) -> list[float | None]:
    """The verdicts of math-verify alone; None: it raised."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    scores: list[float | None] = []
    for answer, response in rows:
        try:
            scores.append(float(verify(parse(f"\\boxed{{{answer}}}"), parse(response))))
        except Exception:  # whatever it raises is no verdict
            scores.append(None)
    return scores


class Counts(NamedTuple):
    """How many verdicts are right, 1 for a wrong answer, 0 for a right one, or missing; `ok`: missing, where that is as
    good."""

    right: int
    wrong_1: int
    wrong_0: int
    abstained: int
    ok: int


def count(corpus: Sequence[Pair], scores: Sequence[float | None]) -> Counts:
    missing = [pair for pair, score in zip(corpus, scores, strict=True) if score is None]
    wrong = [score for pair, score in zip(corpus, scores, strict=True) if score not in (None, float(pair.right))]
    ok = sum(pair.abstain == "ok" for pair in missing)
    wrong_1 = sum(score == 1.0 for score in wrong)
    right = len(corpus) - len(missing) - len(wrong)
    return Counts(right, wrong_1, len(wrong) - wrong_1, len(missing) - ok, ok)


def table(corpus: Sequence[Pair], *verdicts: Sequence[float | None]) -> str:
    """A table in Markdown with a line for each kind; for each list of verdicts five columns."""
    columns = "right | 1 for wrong | 0 for right | abstained | abstained, as good"
    names = ["ours", "math-verify"][: len(verdicts)]
    head = "| kind | pairs | " + " | ".join(f"{name}: {columns}" for name in names) + " |"
    lines = [head, "|---" * (2 + 5 * len(names)) + "|"]
    for kind in [*dict.fromkeys(pair.kind for pair in corpus), "all"]:
        places = [place for place, pair in enumerate(corpus) if kind in (pair.kind, "all")]
        chosen = [corpus[place] for place in places]
        numbers = [number for scores in verdicts for number in count(chosen, [scores[place] for place in places])]
        lines.append(f"| {kind} | {len(places)} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def given_back(answer: Any) -> list[str]:
    """A row's answer as a response, in each form; of several alternatives the first. What is not an answer but a text
    that contains one is not written into another text."""
    text = str(answer[0] if isinstance(answer, list) else answer)
    if isinstance(answer, dict):
        return []
    if "####" in text or "\\boxed" in text:
        return [text]
    return [form.format(text.removesuffix(".") if name == "sentence" else text) for name, form in FORMS.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wrong", action="store_true", help="also each verdict of ours that is not right")
    wrong = parser.parse_args().wrong
    corpus = pairs()
    rows = [(pair.answer, pair.response) for pair in corpus]
    scores = ours(rows)
    print(table(corpus, scores, library(rows)))
    back = [(answer, response) for answer in answers() for response in given_back(answer)]
    same = ours(back)
    print(f"\n{len(answers())} answers given back in {len(FORMS)} forms are {len(back)} responses, of which")
    print(f"{same.count(1.0)} equal their answer, {same.count(0.0)} do not, {same.count(None)} abstain")
    if wrong:
        for pair, score in zip(corpus, scores, strict=True):
            if score != float(pair.right):
                print(f"{score} for {pair.right}: {pair.answer!r} <- {pair.response!r} ({pair.kind}: {pair.why})")
        for (answer, response), score in zip(back, same, strict=True):
            if score != 1.0:
                print(f"{score} for itself: {answer!r} <- {response!r}")


if __name__ == "__main__":
    main()
