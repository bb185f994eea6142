"""Generation under tensor parallelism is that of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.rollout.rank_generation import KINDS

SCRIPT = Path(__file__).with_name("rank_generation.py")


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        pytest.param(2, ("qwen2",), marks=pytest.mark.slow),
        pytest.param(2, KINDS, marks=pytest.mark.slow),
        pytest.param(4, ("gpt2",), marks=pytest.mark.slow),
    ],
)
def test_greedy_and_sampled_tokens_are_those_of_one_process(size: int, kinds: tuple[str, ...]) -> None:
    done = ranks.job(size, SCRIPT, *kinds)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [case["kind"] for case in found] == [*kinds, f"{kinds[0]} invariant"]
    for case in found:
        assert case["preemptions"] > 0  # the first rank decides them for all
        is_whole = case["kind"] == "phi3"  # its fused matrices are put together before the attention
        assert case["bytes"] == (1.0 if is_whole else 1 / size)
        for together in case["together"]:
            compare(together, case["alone"])


def compare(together: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    aborted = [sample["id"] for sample in alone if sample["finish"] == "abort"]
    assert aborted == ["r9"]
    for one, other in zip(alone, together, strict=True):
        assert {**one, "log_probs": None} == {**other, "log_probs": None}
        assert one["log_probs"] == pytest.approx(other["log_probs"], rel=0, abs=1e-9)


@pytest.mark.slow
def test_episodes_guards_grammars_and_stop_strings_are_those_of_one_process(make_tiny: Callable[..., Path]) -> None:
    script, model = SCRIPT.with_name("rank_controls.py"), make_tiny("gpt2", torch.float64)
    runs = [ranks.alone(script, model, 1), ranks.job(2, script, model, 2)]
    alone, together = (
        json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{"))) for run in runs
    )
    for name, rows in alone.items():
        log_probs = together[name].pop("rollout_log_probs")
        for one, other in zip(rows.pop("rollout_log_probs"), log_probs, strict=True):
            assert other == pytest.approx(one, rel=0, abs=1e-9), name
        assert together[name] == rows, name
    # Each did something.
    assert sum(error is not None for error in alone["episode"]["episode_error"]) == 1
    assert "reject" in alone["guard"]["finish"] and sum(alone["guard"]["rejected"]) > 0
    assert "stop" in alone["grammar"]["finish"] and any(len(tokens) < 24 for tokens in alone["stop"]["response_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("who", ["leader", "all"])
def test_a_forward_that_fails_is_raised_at_once(who: str) -> None:
    """The rank that leads does not wait for those that it can no longer reach; they learn of it as it ends."""
    done = ranks.job(2, SCRIPT.with_name("rank_failures.py"), who)
    ended = {each["leads"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert ended[True]["raised"] == "MemoryError"
    assert ended[False]["raised"] == ("MemoryError" if who == "all" else "RuntimeError")
    assert max(each["seconds"] for each in ended.values()) < 20  # a collective waits for 60
