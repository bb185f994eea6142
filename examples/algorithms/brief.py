"""The constraint of `constrained_decoding.yaml`: an answer is brief."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.rollout.constrained import ConstrainedEpisode

LETTERS = 60


def is_brief(text: str, row: Mapping[str, Any]) -> bool:
    return len(text) <= LETTERS


episode = ConstrainedEpisode(accept=is_brief, max_resamples=3)
