"""`kl/eval`: the KL to the reference at evaluations, on their samples, against transformers' own numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl
from tests.ranks import job
from tests.trainer.cases import PROMPTS, SHORT, low_bytes
from tests.trainer.runs import final_state, rows, run_dir, settings
from tests.trainer.test_metrics_page import unknown
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.config import build_config
from verl.data.offline import OfflineDatasetLoader
from verl.data.prompts import load_prompts
from verl.errors import ConfigError
from verl.report.reading import curves_in, read_rows
from verl.run.build import placed_roles
from verl.run.train import train
from verl.trainer.evaluation import Evaluation, HeldOut

HELD_OUT = ["And about", "Tell me", "Why"]
WITH_KL = {"trainer.eval_metrics": ["kl"]}


def evaluated(path: Path, held_out: HeldOut, **options: Any) -> tuple[verl.Trainer, list[dict[str, Any]]]:
    """A trainer after two updates, and its records of evaluations."""
    records: list[dict[str, Any]] = []
    actor = verl.Actor(path, optim={"lr": 1e-2}, sampling=SHORT, **options)
    trainer = verl.Trainer(
        actor,
        reward_fn=low_bytes,
        algorithm="grpo",
        n=4,
        log_dir=False,
        held_out=held_out,
        on_log_hook=lambda step, record: records.append(record),
    )
    trainer.fit([PROMPTS] * 2)
    return trainer, [record for record in records if "eval/reward" in record]


def next_tokens(path: Path, samples: Batch, temperature: float) -> list[torch.Tensor]:
    """By sample `[tokens, vocabulary]`: the log of what a model of transformers gives each token of the response."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    found = []
    for prompt, response in zip(samples["prompt_tokens"], samples["response_tokens"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1))
    return found


@pytest.mark.quick("greedy-adapters", "greedy-weights")
@pytest.mark.parametrize("lora", [None, {"r": 4, "targets": "all-linear"}], ids=["weights", "adapters"])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "drawn"])
def test_it_is_what_transformers_gives(
    tmp_path: Path, make_tiny: Callable[..., Path], temperature: float, lora: dict[str, Any] | None
) -> None:
    path = make_tiny(dtype=torch.float64)
    noted: list[Evaluation | None] = []
    held_out = HeldOut(load_prompts(HELD_OUT), n=1 if temperature == 0 else 32, temperature=temperature, kl=True)
    held_out.on_result = lambda result, found: noted.append(found)
    trainer, (first, last) = evaluated(path, held_out, **({} if lora is None else {"lora": lora}))
    assert first["kl/eval"] == pytest.approx(0.0, abs=1e-16 if lora is None else 1e-12)
    assert not unknown(first)
    assert (trainer.actor.reference.model is None) == (lora is not None)  # without its adapters it is the start

    trainer.actor.save_pretrained(str(tmp_path / "after"))
    assert noted[-1] is not None
    samples = noted[-1].samples
    tokens = torch.cat([torch.tensor(response) for response in samples["response_tokens"]])[:, None]
    after, start = (torch.cat(next_tokens(p, samples, temperature or 1.0)) for p in (tmp_path / "after", path))
    exact = (after.exp() * (after - start)).sum(-1)
    p, q = (log.gather(1, tokens)[:, 0].exp() for log in (after, start))
    if temperature == 0:
        by_token = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        assert bool((by_token <= exact).all())
    else:
        by_token = q / p - 1 - (q / p).log()
        error = float((by_token - exact).std() / len(exact) ** 0.5)
        assert float(by_token.mean()) == pytest.approx(float(exact.mean()), abs=4 * error)
    assert last["kl/eval"] == pytest.approx(float(by_token.mean()), rel=1e-9)
    assert last["kl/eval"] > 1e-6


def test_it_is_of_the_tokens_of_all_tasks(tiny: Path) -> None:
    records: list[dict[str, Any]] = []
    trainer = verl.Trainer(
        verl.Actor(tiny, optim={"lr": 1e-2}, sampling=SHORT),
        tasks=[verl.Task(name, "grpo", {"reward": low_bytes}, n=4) for name in "ab"],
        log_dir=False,
        held_out=HeldOut(load_prompts([{"prompt": text, "task": task} for text in HELD_OUT for task in "ab"]), kl=True),
        on_log_hook=lambda step, record: records.append(record),
    )
    trainer.fit([{"a": PROMPTS, "b": PROMPTS}] * 2)
    first, last = (record for record in records if "eval/reward" in record)
    assert first["kl/eval"] == 0.0 < last["kl/eval"]
    assert {"task/a", "task/b"} <= {key.removeprefix("eval/")[:6] for key in last}


def test_it_is_not_there_unless_asked_for(tiny: Path) -> None:
    trainer, records = evaluated(tiny, HeldOut(load_prompts(HELD_OUT)))
    assert len(records) == 2 and not any("kl/eval" in record for record in records)
    assert trainer.actor.reference.model is None


@pytest.mark.slow
def test_a_run_measures_it_and_learns_as_without(tmp_path: Path, tiny: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    train(build_config(settings(tmp_path / "a", tiny, **WITH_KL)))
    train(build_config(settings(tmp_path / "b", tiny)))
    train(build_config(settings(tmp_path / "c", tiny, **WITH_KL, **{"trainer.total_steps": 2})))
    train(build_config(settings(tmp_path / "c", tiny, **WITH_KL)))  # its reference is read again
    a, b, c = (run_dir(tmp_path / name) for name in "abc")
    measured = [(row["step"], row["kl/eval"]) for row in rows(a) if "kl/eval" in row]
    assert [step for step, _ in measured] == [0, 3, 6]
    assert measured[0][1] == 0.0 < min(value for _, value in measured[1:])
    resumed = {row["step"]: row["kl/eval"] for row in rows(c) if "kl/eval" in row}
    assert resumed.keys() == {0, 2, 3, 6} and all(resumed[step] == value for step, value in measured)
    without = [{key: value for key, value in row.items() if key != "kl/eval"} for row in rows(a)]
    assert without == rows(b)
    first, second = final_state(a), final_state(b)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert curves_in(read_rows(a / "metrics.jsonl"), [])["kl/eval"] == [[step, value] for step, value in measured]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"trainer.placement": {"rollout": "cpu:0", "actor": "cpu:1", "reference": "cpu:0"}},
        {"trainer.placement": "cpu:0-1", "actor_rollout_ref.actor.strategy": "fsdp"},
    ],
    ids=["apart", "fsdp"],
)
def test_ranks_measure_what_one_process_does(
    tmp_path: Path, make_tiny: Callable[..., Path], layout: dict[str, Any]
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    path = make_tiny(dtype=torch.float64)
    short = {**WITH_KL, "trainer.total_steps": 2, "trainer.eval_every": 1}
    train(build_config(settings(tmp_path / "one", path, **short)))
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings(tmp_path / "two", path, **short, **layout)))
    job(2, "-m", "verl", "train", file)
    one, two = (
        [row["kl/eval"] for row in rows(run_dir(tmp_path / name)) if "kl/eval" in row] for name in ("one", "two")
    )
    assert len(one) == 3 and one[0] == two[0] == 0.0 < one[1]
    assert two == pytest.approx(one, rel=1e-7)


def test_what_it_cannot_be_measured_on_is_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.eval_metrics: is set, but data\.eval names no problems"):
        build_config(settings(tmp_path, tiny, **WITH_KL, **{"data.eval": None, "trainer.eval_every": None}))
    with pytest.raises(ConfigError, match=r"must be kl, or a function as FILE\.py:FUNCTION, not 'k1'"):
        build_config(settings(tmp_path, tiny, **{"trainer.eval_metrics": ["k1"]}))
    recorded = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    batch = OfflineDatasetLoader(recorded, verl.Actor(tiny).tokenizer).batch
    with pytest.raises(ConfigError, match="the pairs are recorded responses"):
        HeldOut(batch, kl=True, name="the pairs")


def test_the_reference_is_a_role_of_the_run(tmp_path: Path, tiny: Path) -> None:
    algorithms = [make_algorithm("grpo")]
    roles = [placed_roles(build_config(settings(tmp_path, tiny, **changes)), algorithms) for changes in ({}, WITH_KL)]
    assert roles == [["actor", "rollout"], ["actor", "rollout", "reference"]]
