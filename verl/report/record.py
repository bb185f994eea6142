"""The record of a step, as it is logged: a flat mapping of names such as "reward/mean" to numbers, booleans or text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def numbers_of(record: Record) -> dict[str, float]:
    """What of a record is a number."""
    numbers = {name: _number(value) for name, value in record.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, RuntimeError):  # a tensor or array of several numbers
        return None


def plain(value: Any) -> Any:
    """A value as JSON has it; what is neither a number nor text becomes its text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = _number(value)
    if number is None:
        return str(value)
    return number if math.isfinite(number) else None
