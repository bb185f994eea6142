"""Conditions of rewards, prefixes of prompts, and that each sample is learned behind its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import verl
from tests.algorithms.support import experience
from tests.trainer.cases import PROMPTS, SHORT, low_bytes, make
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.data.tokenize import with_prefixes
from verl.errors import DataError
from verl.weights.shard import checksum


def conditions(rewards: list[float | None], **columns: Any) -> list[int]:
    batch = experience([2] * len(rewards), ["g"] * len(rewards), rewards, **columns)
    return list(make_algorithm("reward_conditioned", prefixes=["a", "b", "c"]).prepare(batch)[0]["condition"])


def test_conditions_are_quantiles_of_distinct_rewards() -> None:
    assert conditions([6.0, 1.0, 5.0, 2.0, 4.0, 3.0]) == [2, 0, 2, 0, 1, 1]
    assert conditions([0.0, 1.0, 0.0, 0.0]) == [0, 2, 0, 0]  # equal rewards are one condition
    assert conditions([0.0, None, 1.0, float("nan")]) == [0, 2]
    assert conditions([7.0, 7.0, None]) == [0, 0]  # nothing is better than anything
    assert conditions([None, None]) == []
    tokens = [[0.5, 0.5], [0.0, 2.0], [-1.0, 0.0]]
    assert conditions([9.0, 0.0, 5.0], token_rewards=tokens) == [1, 2, 0]


def test_a_prefix_takes_the_place_of_another(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    prompts = [encode("One"), encode("Two plus")]
    bare = Batch.from_columns({"prompt_tokens": prompts, "rollout_log_probs": [[0.5], [0.25]]})
    first = with_prefixes(tokenizer, bare, ["a:", "long one:"])
    assert first["prompt_tokens"] == [encode("a:One"), encode("long one:Two plus")]
    assert "rollout_log_probs" not in first  # they were of tokens behind another prompt
    assert with_prefixes(tokenizer, first, ["a:", "long one:"]) is first
    second = with_prefixes(tokenizer, first, ["bc:", "a:"])
    assert second["prompt_tokens"] == [encode("bc:One"), encode("a:Two plus")]
    assert second["prefix_tokens"] == [encode("bc:"), encode("a:")]
    for prefixes, words in ((["", "a:"], "no tokens for the prefix ''"), (["x", "y"], "same tokens for 'x' and 'y'")):
        with pytest.raises(DataError, match=words):
            with_prefixes(tokenizer if "" in prefixes else Blind(), bare, prefixes)


class Blind:
    """A tokenizer with one word."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] if text else []}


def test_a_prefix_stands_behind_the_token_that_begins_every_text() -> None:
    class Beginning(Blind):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [9] * add_special_tokens + [ord(letter) for letter in text]}

    batch = Batch.from_columns({"prompt_tokens": [[9, 65], [65]]})  # the second one was given without it
    assert with_prefixes(Beginning(), batch, ["a", "b"])["prompt_tokens"] == [[9, 97, 65], [98, 65]]
    again = with_prefixes(Beginning(), with_prefixes(Beginning(), batch, ["a", "b"]), ["cc", "dd"])
    assert again["prompt_tokens"] == [[9, 99, 99, 65], [100, 100, 65]]


def test_samples_are_drawn_under_the_highest_and_learned_under_their_own(tiny: Path) -> None:
    """A step is one of likelihood on prompts that were written with the prefixes by hand."""
    seen: list[list[str]] = []

    def reward(completions: list[str], prompts: list[str]) -> list[float]:
        seen.append(prompts)
        return low_bytes(completions)

    options: dict[str, Any] = {"n": 4, "prefixes": ["<1>", "<2>"], "log_dir": False}
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="reward_conditioned", **options)
    trainer.step(PROMPTS)
    assert {prompt for prompts in seen for prompt in prompts} == set(PROMPTS)  # rewards do not see it
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    samples = actor.generate_sequences([f"<2>{prompt}" for prompt in PROMPTS], n=4, key="s0")
    rewards = torch.tensor(low_bytes(samples["response"]))
    distinct, rank = rewards.unique(return_inverse=True)
    low = rank * 2 < len(distinct)
    assert 0 < int(low.sum()) < len(low)
    prompts = [
        actor.tokenizer(f"<{1 if is_low else 2}>{p[3:]}")["input_ids"]
        for p, is_low in zip(samples["prompt"], low, strict=True)
    ]
    actor.train(samples.drop(["prompt_tokens"]).add({"prompt_tokens": prompts}), make_algorithm("sft"))
    assert checksum(actor.shards()) == checksum(trainer.actor.shards())


def test_evaluation_a_pipeline_and_a_plain_loop_ask_for_the_highest(tiny: Path) -> None:
    trainer = make(tiny, "reward_conditioned", n=2)
    highest = trainer.actor.tokenizer("Reward 5 of 5.\n")["input_ids"]
    batch = trainer.evaluate(PROMPTS).samples
    assert all(tokens[: len(highest)] == highest for tokens in batch["prompt_tokens"])
    actor = verl.Actor(str(tiny), sampling=SHORT, algorithm="reward_conditioned")
    updater = verl.Updater("reward_conditioned", actor=actor)
    pipeline = verl.RLDataPipeline().add_stage("rollout", actor).add_stage("reward", low_bytes)
    pipeline.add_stage("update", updater)
    for samples in (batch, actor.generate_sequences(PROMPTS), pipeline.run(PROMPTS).batch):
        assert all(tokens == highest for tokens in samples["prefix_tokens"]), samples
