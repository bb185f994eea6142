"""The agent of examples/agent, on the real `openai` package: what it scores, and that it is trained."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_packages import openai_package
from tests.rollout.test_gateway_server import CALL, Run

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "agent"
WRONG = CALL.replace('"b": 2', '"b": "two"')


@pytest.fixture
def script() -> Iterator[Callable[[str], dict[str, Any]]]:
    """What a script of the example defines."""
    with openai_package(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield lambda name: runpy.run_path(str(EXAMPLE / name))


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([CALL, "4<|im_end|>"], 1.0),
        ([CALL, "It is five.<|im_end|>"], 0.2),
        ([WRONG, CALL, "4<|im_end|>"], 1.0),
        ([CALL, CALL, CALL, CALL], 0.2),
        (["5<|im_end|>"], 0.0),
    ],
)
def test_what_an_episode_scores(script: Callable[[str], dict[str, Any]], turns: list[str], reward: float) -> None:
    row = {"prompt": "What is 2 + 2?", "answer": "4"}
    run = Run(script("assistant.py")["assistant"], turns, row=row)
    (trajectory,) = run.record.trajectories
    assert run.record.result.reward == reward and not run.record.excluded
    used = min(len(turns), 3)
    wrote = [token for token, mask in zip(trajectory.response_tokens, trajectory.response_mask, strict=True) if mask]
    assert run.engine.tokenizer.decode(wrote) == "".join(turns[:used])


def test_questions_of_training_and_evaluation_differ(script: Callable[[str], dict[str, Any]]) -> None:
    questions = script("train.py")["questions"]
    trained = {row["prompt"] for step in range(20) for row in questions(8, f"0, {step}")}
    held_out = {row["prompt"] for row in questions(64, "held out", held_out=True)}
    assert len(trained) > 100 and len(held_out) > 50 and not trained & held_out


@pytest.mark.slow
def test_a_step_of_the_example(
    script: Callable[[str], dict[str, Any]], smol: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its gain over whole runs: examples/agent/README.md."""
    options = ["--model", str(smol), "--steps", "1", "--questions", "3", "--held_out", "24", "--log_dir", str(tmp_path)]
    result = script("train.py")["main"](options)
    assert 0.05 <= result["before"] <= 0.4 and result["low"] <= result["gain"] <= result["high"]
    shown = capsys.readouterr().out
    assert f"step 0: {result['before']:.1%} of held-out questions solved" in shown and "95 % interval" in shown
    assert (tmp_path / "completions" / "train-000001.parquet").exists()
