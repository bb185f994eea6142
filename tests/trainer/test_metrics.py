"""Metrics of the user's own: forms, failures, and names."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import verl
from verl.batch import Batch
from verl.errors import ConfigError, RewardError
from verl.report.metrics import Metric

SAMPLES = Batch.from_columns(
    {
        "group": ["a", "a", "b"],
        "prompt": ["1+1", "1+1", "1+2"],
        "response": ["2", "3", "3"],
        "answer": ["2", "2", "3"],
        "finish": ["stop"] * 3,
        "reward": [1.0, 0.0, None],
    }
)
SHORT = {"max_new_tokens": 2}


def exact(responses: list[str], answer: list[str]) -> list[float]:
    assert len(responses) == 3, "one call for all samples"
    return [float(response == right) for response, right in zip(responses, answer, strict=True)]


def exact_trl(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return exact(completions, answer)


def exact_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


async def exact_async(responses: list[str], prompts: list[str]) -> list[float]:
    return [float(eval(prompt) == int(response)) for response, prompt in zip(responses, prompts, strict=True)]


def share(samples: Batch, of: float = 1.0) -> float:
    return sum(reward == of for reward in samples["reward"]) / len(samples)


@pytest.mark.parametrize(
    ("function", "value", "rows"),
    [
        (exact, 2 / 3, [1.0, 0.0, 1.0]),
        (exact_trl, 2 / 3, [1.0, 0.0, 1.0]),
        (exact_async, 2 / 3, [1.0, 0.0, 1.0]),
        (lambda texts: [len(text) for text in texts], 1.0, [1.0, 1.0, 1.0]),
        (lambda text: [None, 1, 2], 1.5, [None, 1.0, 2.0]),
        (share, 1 / 3, None),
        (partial(share, of=0.0), 1 / 3, None),
        (lambda batch: np.float32(0.5), 0.5, None),
        (lambda anything: [1, None, 2], 1.5, [1, None, 2]),
        (lambda *samples: len(samples[0]), 3.0, None),
        (len, 3.0, None),
    ],
)
def test_forms(function: Any, value: float, rows: list[float | None] | None) -> None:
    assert Metric("m", function)(SAMPLES) == (pytest.approx(value), rows)


def test_verl_s_form_reads_its_columns() -> None:
    rows = SAMPLES.add({"data_source": ["x"] * 3, "ground_truth": SAMPLES["answer"]})
    assert Metric("m", exact_verl)(rows) == (pytest.approx(2 / 3), [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact", "metric 'm' is a str"),
        (lambda prompt, response: 0, r"metric 'm' is no f\(samples\).*did you mean <lambda>\(prompts, responses\)"),
        (lambda prompts: [], "metric 'm' is no f"),
    ],
)
def test_other_forms_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Metric("m", function)


def test_a_lacking_column_is_named() -> None:
    with pytest.raises(RewardError, match=r"metric 'm' needs a column 'answr'.*did you mean 'answer'"):
        Metric("m", lambda responses, answr: [0] * 3)(SAMPLES)


def _raises(samples: Any) -> float:
    raise ZeroDivisionError("no samples")


def _raises_by_row(texts: list[str]) -> list[float]:
    raise ZeroDivisionError("no samples")


@pytest.mark.parametrize("function", [_raises, _raises_by_row])
def test_one_that_raises_is_nan_then_ends_the_run_by_name(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    metric = Metric("broken", function)
    for _ in range(21):  # 63 samples
        assert math.isnan(metric(SAMPLES)[0])
    with pytest.raises(
        RewardError, match=r"metric.* 'broken' failed on 66 of the latest 66 samples.*ZeroDivisionError"
    ):
        metric(SAMPLES)
    shown = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("Traceback" in text and "metric broken" in text for text in shown) == 1
    assert sum(f"{__file__} line" in text for text in shown) >= 22


def test_training_and_evaluation_measure_the_same(tiny: Path) -> None:
    trainer = verl.Trainer(
        verl.Actor(str(tiny), sampling=SHORT), reward_fn=lambda texts: [1.0] * len(texts), algorithm="grpo", n=2,
        log_dir=False,
    )  # fmt: skip
    trainer.add_metric("chars", lambda responses, prompts: [len(text) for text in responses])
    trainer.add_metric("known", lambda samples: 1 / 0 if trainer.steps else 1.0)
    first, second = (trainer.step(["A", "B"]) for _ in range(2))
    assert first["chars"] > 0 and first["known"] == 1.0 and math.isnan(second["known"])
    found = trainer.evaluate(["A"], {"chars": lambda completions: [len(text) for text in completions]})
    assert found.rows["chars"] == [len(found.samples["response"][0])]


@pytest.mark.parametrize("name", ["reward", "reward/mean", "response/length", "loss/actor", "updated", "time/step"])
def test_a_name_of_the_trainer_s_own_is_refused(tiny: Path, name: str) -> None:
    """Whenever in the step the trainer measures it; it was replaced, or replaced the user's."""
    actor = verl.Actor(str(tiny), sampling=SHORT)
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [1.0] * len(texts), algorithm="grpo", n=2, log_dir=False)
    trainer.add_metric(name, lambda samples: 7.0)
    with pytest.raises(ConfigError, match=f"has a metric '{name}' of its own"):
        trainer.step(["A", "B"])


def test_recorded_rows_are_measured_too(tiny: Path) -> None:
    trainer = verl.Trainer(verl.Actor(str(tiny)), algorithm="sft", log_dir=False)
    trainer.add_metric("tokens", lambda samples: float(sum(samples.lengths("response_tokens"))))
    assert trainer.step([{"prompt": "A", "response": "Bc"}])["tokens"] >= 2
