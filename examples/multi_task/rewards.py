"""The rewards of two of the tasks."""

from __future__ import annotations

import re

WORDS = 12


def is_date(texts: list[str]) -> list[float]:
    """1 for a response that is a date such as 1969-07-20, and nothing else."""
    return [float(re.fullmatch(r"[12]\d{3}-[01]\d-[0-3]\d", text.strip()) is not None) for text in texts]


def brief(texts: list[str]) -> list[float]:
    """1 for whole sentences of at most so many words; half of it for their end, half for their length."""
    return [0.5 * text.strip().endswith(".") + 0.5 * min(1.0, WORDS / max(len(text.split()), 1)) for text in texts]
