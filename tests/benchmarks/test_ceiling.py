"""The ceiling counts the products of what was computed, and nothing else."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import verl

Benchmark = Callable[[str], ModuleType]
PROMPTS = ["one", "another", "one more"]


def all_different(texts: list[str]) -> list[float]:
    return [float(i) for i in range(len(texts))]


def sums(shapes: Mapping[Any, int]) -> tuple[int, int]:
    """Tokens and rows of all forwards."""
    return sum(s.tokens * n for s, n in shapes.items()), sum(s.rows * n for s, n in shapes.items())


def test_forwards_are_recorded_as_they_are_packed(benchmark: Benchmark, tiny: Path) -> None:
    actor = verl.Actor(str(tiny), dtype="float32", sampling={"max_new_tokens": 5, "ignore_eos": True})
    trainer = verl.Trainer(actor, reward_fn=all_different, algorithm="grpo", n=4, log_dir=False)
    lengths = sum(len(actor.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    with benchmark("ceiling").Forwards.recorded() as seen:
        trainer.step(PROMPTS)
        # A prompt is computed once for its four samples, and nothing is computed for a sample's last token.
        assert sums(seen.rollout) == (lengths + 3 * 4 * 4, 3 * 4 * 5)
        assert sums(seen.update) == (lengths + 3 * 4 * 4, 3 * 4 * 5)
        assert all(shape.backward for shape in seen.update)
        assert not any(shape.backward for shape in seen.rollout)
        seen.clear()
        assert not seen.rollout and not seen.update
    trainer.step(PROMPTS)
    assert not seen.rollout and not seen.update


def test_products_are_those_of_layers_and_head(benchmark: Benchmark, tiny: Path) -> None:
    """FLOPs of a forward and backward, as torch counts them for the model itself."""
    from transformers import AutoModelForCausalLM

    ceiling = benchmark("ceiling")
    products = ceiling.Products(tiny, "float32", "cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    for way in products.ways:
        assert sum(weight.numel() for weight in way) == sum(
            module.weight.numel() for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)
        )
    assert len(products.ways[0]) == 4 * model.config.num_hidden_layers  # query, key and value are one; gate and up, too
    assert len(products.ways[1]) == 7 * model.config.num_hidden_layers
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    of_attention = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" in str(op))
    assert products.flops(ceiling.Shape(8, 8, True)) == counter.get_total_flops() - of_attention


def test_experts_are_refused(benchmark: Benchmark, tmp_path: Path) -> None:
    from transformers import MixtralConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    MixtralConfig(vocab_size=260, num_key_value_heads=2, num_local_experts=4, **sizes).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="experts"):
        benchmark("ceiling").Products(tmp_path, "float32", "cpu")


def test_many_rows_are_timed_by_parts(benchmark: Benchmark, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as they fit, and of equal weights a few; what was not timed counts as what was."""
    ceiling = benchmark("ceiling")
    products, calls = ceiling.Products(tiny, "float32", "cpu"), []

    def median(weights: Any, rows: int, backward: bool) -> float:
        calls.append((len(weights), rows))
        return float(sum(weight.numel() for weight in weights) * rows)

    monkeypatch.setattr(products, "_median", median)
    monkeypatch.setattr(ceiling, "_CHUNK", 64 * 1000)
    monkeypatch.setattr(ceiling, "_FEW", 1)
    layers = [torch.empty(64, 32)] * 3 + [torch.empty(32, 32)]
    assert products.timed(layers, 2500, False) == 2500 * (3 * 64 + 32) * 32
    assert calls == [(1, 1000), (1, 500)] * 2
    calls.clear()
    assert products.timed(layers, 100, True) == 100 * (3 * 64 + 32) * 32
    assert calls == [(4, 100)]


def test_few_sizes_are_timed(benchmark: Benchmark) -> None:
    timed: list[int] = []

    def seconds(size: int) -> float:
        timed.append(size)
        return 3.0 * size

    counts = dict.fromkeys(range(1, 101), 2)
    assert benchmark("ceiling")._interpolated(counts, seconds) == pytest.approx(2 * 3.0 * 5050)
    assert len(timed) == 16 and {1, 100} <= set(timed)
    assert benchmark("ceiling")._interpolated({0: 5}, seconds) == 0.0


@pytest.mark.slow
def test_a_process_times_them_and_ends(benchmark: Benchmark, tiny: Path) -> None:
    ceiling = benchmark("ceiling")
    shape = ceiling.Shape(64, 64, True)
    with ceiling.Ceiling(tiny, "float32", 1) as limit:
        once, often = limit.seconds({shape: 1}), limit.seconds({shape: 1000})
    assert limit._process.returncode == 0
    assert 0 < once < often


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update/rows_left_out": 1.0}, "left out"),
        ({"reward/groups_alike": 0.25}, "left out"),
        ({"rollout/tokens": 63.0}, "full length"),
    ],
)
def test_a_step_that_is_not_the_agreed_work_fails(
    benchmark: Benchmark, changes: dict[str, float], message: str
) -> None:
    args = argparse.Namespace(prompts=2, samples=4, new_tokens=8)
    log = {"rollout/tokens": 64.0, "reward/groups_alike": 0.0}
    benchmark("verl_grpo_step").check(args, [log, log])
    with pytest.raises(SystemExit, match=message):
        benchmark("verl_grpo_step").check(args, [log, log | changes])


def test_rewards_of_the_benchmark_differ(benchmark: Benchmark) -> None:
    reward = benchmark("workload").reward
    texts = ["no such letter"[:n] for n in range(3, 10)]
    assert len({reward(text) for text in texts}) == len(texts)
    assert [int(reward(text)) for text in ("see", "e", "")] == [2, 1, 0]


def test_there_are_as_many_prompts_as_are_asked_for(benchmark: Benchmark) -> None:
    texts = benchmark("workload").prompts(benchmark("made_model").tokenizer(), 70)
    assert len(set(texts)) == 70


def test_sizes_of_a_rollout(benchmark: Benchmark) -> None:
    rollout = benchmark("rollout")
    args = rollout.parsed(["--new-tokens", "16"])
    assert {size: rollout.sized(args, size).prompts * rollout.sized(args, size).samples for size in rollout.SIZES} == {
        "large": 256,
        "small": 32,
        "long": 32,
    }
    assert {rollout.sized(args, size).new_tokens for size in rollout.SIZES} == {16}
    long = rollout.sized(rollout.parsed([]), "long")
    assert long.prompt_tokens + long.new_tokens == 2048
    assert json.loads(json.dumps(vars(long)))["sizes"] == ["large"]
