"""Reward functions by TRL's names and of its behaviour: mathematics, thinking, repetition, and length."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from verl.errors import ConfigError

_THINKS = re.compile(r"^<think>(?!.*<think>).*?</think>.*$", re.DOTALL | re.MULTILINE)
#: Seconds for reading an answer, and for comparing it, where the library can be interrupted.
_PARSING, _COMPARING = 10, 5
Chats = Sequence[Sequence[dict[str, str]]]


def accuracy_reward(
    completions: Chats, solution: Sequence[str], log_extra: Any = None, **columns: Any
) -> list[float | None]:
    """1 where the first answer in LaTeX equals the row's `solution` as mathematics, else 0; None where the solution
    cannot be read.

    Raises:
        ConfigError: math-verify is not installed.
    """
    texts = [completion[0]["content"] for completion in completions]
    return _shown([_compared(text, gold) for text, gold in zip(texts, solution, strict=True)], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Chats,
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Any = None,
    **columns: Any,
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning; 0 where the reasoning has no end.

    Args:
        reasoning_delimiters: what ends it, the first of them that is there; None: `</think>`.
    """
    results: list[tuple[float | None, str, str]] = []
    for completion, gold in zip(completions, solution, strict=True):
        text = completion[0]["content"]
        end = next((mark for mark in reasoning_delimiters or ["</think>"] if mark in text), None)
        unfinished = (0.0, "[incomplete reasoning]", "[incomplete reasoning]")
        results.append(unfinished if end is None else _compared(text.rpartition(end)[2], gold))
    return _shown(results, solution, log_extra)


def _compared(text: str, gold: str) -> tuple[float | None, str, str]:
    """The reward, and the answers parsed from the solution and from the text."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ConfigError("accuracy_reward needs math-verify: pip install 'verl-hybrid[math]'") from error
    interrupts = threading.current_thread() is threading.main_thread()  # by a signal, which other threads do not get
    parsing, comparing = (_PARSING, _COMPARING) if interrupts else (None, None)
    truth = parse(gold, parsing_timeout=parsing)
    if not truth:
        return None, "[unparseable]", "[skipped]"
    reading = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    answer = parse(text, extraction_config=[reading], extraction_mode="first_match", parsing_timeout=parsing)
    return float(verify(truth, answer, timeout_seconds=comparing)), str(truth), str(answer or "[unparseable]")


def _shown(
    results: Sequence[tuple[float | None, str, str]], solution: Sequence[str], log_extra: Any
) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", [*solution])
        log_extra("gold_parsed", [gold for _, gold, _ in results])
        log_extra("answer_parsed", [answer for _, _, answer in results])
    return [reward for reward, _, _ in results]


def think_format_reward(completions: Chats, **columns: Any) -> list[float]:
    """1 where the completion begins with one `<think>...</think>`, else 0."""
    return [float(_THINKS.match(completion[0]["content"]) is not None) for completion in completions]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """`accuracy_reward` by the completion's length (arXiv:2502.03373, appendix C.1): a short right answer is worth more
    than a long one, a short wrong one less.

    Raises:
        ConfigError: `max_len` is below 1.
    """
    if max_len < 1:
        raise ConfigError(f"max_len={max_len}: at least 1 token")

    def cosine_scaled_reward(
        completions: Chats, solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            # From the first value at no token to the second at `max_len`.
            one, two = (max_value_correct, min_value_correct) if right else (min_value_wrong, max_value_wrong)
            scaled = two + (one - two) * (1 + math.cos(math.pi * min(len(ids) / max_len, 1))) / 2
            rewards.append(None if right is None else scaled)
        return rewards

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of the completion's n-grams of tokens that are repetitions.

    Raises:
        ConfigError: the penalty is above 0, or the n-grams have no token.
    """
    if max_penalty > 0:
        raise ConfigError(f"max_penalty={max_penalty} should not be positive")
    if ngram_size < 1:
        raise ConfigError(f"ngram_size={ngram_size}: at least 1 token")

    def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        penalties = []
        for ids in completion_ids:
            ngrams = [tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)]
            repeated = len(ngrams) - len(set(ngrams))
            penalties.append(max_penalty * repeated / len(ngrams) if repeated else 0.0)
        return penalties

    return repetition_penalty_reward


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's (arXiv:2503.14476, equation 13): from 0 down to -1 over the last `soft_punish_cache` tokens, and -1 beyond
    `max_completion_len`.

    Raises:
        ConfigError: the last tokens are more than there are.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigError(f"soft_punish_cache={soft_punish_cache}: from 0 to max_completion_len={max_completion_len}")

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        over = [max(0, len(ids) + soft_punish_cache - max_completion_len) for ids in completion_ids]
        return [
            -1.0 if excess > soft_punish_cache else -excess / soft_punish_cache if excess else 0.0 for excess in over
        ]

    return soft_overlong_punishment_reward
