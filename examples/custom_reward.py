"""Rewards of your own, in the forms that verl and TRL know. In YAML:

reward:
  path: examples/custom_reward.py:brevity
"""

from __future__ import annotations

from typing import Any


def brevity(responses: list[str], prompts: list[str]) -> list[float]:
    """Short answers, as a share of the prompt's length."""
    return [1.0 - min(1.0, len(r) / max(len(p), 1)) for r, p in zip(responses, prompts, strict=True)]


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """verl's form, sample by sample: the response is the answer."""
    return float(solution_str.strip() == ground_truth)


def polite(prompts: list[str], completions: list[Any], **columns: Any) -> list[float]:
    """TRL's form; completions of chats are lists of messages."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float("please" in text.lower()) for text in texts]
