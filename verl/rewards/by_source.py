"""The scores that volcengine/verl chooses by a row's `data_source`: GSM8K's and MATH's."""

from __future__ import annotations

import re
from typing import Any

from verl._base.names import check_known
from verl.errors import DataError, RewardError
from verl.rewards.answers import boxes

GSM8K = ("openai/gsm8k",)
MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_KNOWN = (*GSM8K, *MATH)
_OWN = (
    "; for others write reward.path=FILE.py:FUNCTION of a function compute_score(data_source, solution_str, "
    "ground_truth, extra_info)"
)
#: What a response has to end with in GSM8K, within this many characters.
_MARKED, _END = re.compile(r"#### (-?[0-9.,]+)"), 300
#: Spellings of one answer: (pattern, what it becomes), in order.
_SPELLINGS = (
    (r"\n|\\!|\\left|\\right|\\\$|\\%|%|\^\{?\\circ\}?", ""),
    (r"\\\\", r"\\"),
    (r"[td]frac", "frac"),
    (r"\\text\{ [^{}]*\}$", ""),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"^[A-Za-z]{1,2}\s*=", ""),
    (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    (r"\s", ""),
    (r"\\frac(\w)(\w|(?=\{))", r"\\frac{\1}{\2}"),
    (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
    (r"^0\.5$", r"\\frac{1}{2}"),
)


def score_by_source(data_source: str, solution_str: str, ground_truth: Any) -> float:
    """1.0 where the answer in the response equals the row's, else 0.0: of GSM8K the last number behind "####" near the
    end, of MATH the last box, spelt alike.

    Raises:
        RewardError: there is no score for such rows.
    """
    if data_source in GSM8K:
        numbers = _MARKED.findall(solution_str[-_END:])
        return float(bool(numbers) and numbers[-1].replace(",", "") == str(ground_truth))
    if data_source in MATH:
        inside = [content for *_, content in boxes(solution_str)]
        answers = [*inside[-1:], str(ground_truth)]
        for pattern, plain in _SPELLINGS:
            answers = [re.sub(pattern, plain, answer) for answer in answers]
        return float(bool(inside) and answers[0] == answers[1])
    raise RewardError(f"rows of data_source '{data_source}' have no score here ({', '.join(_KNOWN)} have{_OWN})")


vars(score_by_source).update(
    judges="last_turn",
    check_values=lambda where, rows: check_known(
        f"{where}: the column 'data_source' has", rows["data_source"], _KNOWN, DataError, _OWN
    ),
)
