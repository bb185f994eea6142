"""Random requests, reasonable and not: each is answered or refused with a reason, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from verl.errors import ConfigError, RolloutError
from verl.models.packed import PackedModel
from verl.rollout.base import Request, SamplingParams, Verdict
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.embedded.kv_cache import KVCache
from verl.weights.shards import model_shards

MAX_LENGTH = 160


def make_engine(
    packed: PackedModel, tokenizer: PreTrainedTokenizerFast, blocks: int, ahead: bool = False
) -> EmbeddedEngine:
    size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype)
    return EmbeddedEngine(
        packed,
        eos_token_ids=(2,),
        seed=0,
        tokenizer=tokenizer,
        max_batch=24,
        kv_memory=blocks * size,
        max_length=MAX_LENGTH,
        step_tokens=64,
        compiled=not ahead,
        look_ahead=ahead,
    )


def random_params(rng: random.Random) -> SamplingParams:
    """
    Raises:
        ConfigError: one in ten is out of range.
    """
    length = rng.choice([0, 1, 2, 7, 40, MAX_LENGTH])
    values: dict[str, Any] = {
        "max_new_tokens": length,
        "min_new_tokens": rng.randrange(length + 1) if rng.random() < 0.1 else 0,
        "temperature": rng.choice([0, 0.3, 1.0, 5.0, 1e-9]),
        "top_k": rng.choice([0, 0, 1, 20, 10**9]),
        "top_p": rng.choice([1.0, 1.0, 0.5, 1e-9]),
        "min_p": rng.choice([0.0, 0.1, 1.0]),
        "stop": rng.choice([(), (), (), ("a",), ("é\n", "\ufffd", "xyz" * 30), (" ", "\U0001f600")]),
        "stop_token_ids": rng.choice([(), (), (5, 6), (-1, 10**12), tuple(range(300))]),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.1:
        values |= rng.choice(
            [
                {"max_new_tokens": -1},
                {"min_new_tokens": length + 1},
                {"temperature": rng.choice([-1.0, float("nan"), float("inf")])},
                {"top_k": -3},
                {"top_p": rng.choice([0.0, 1.5, float("nan")])},
                {"min_p": -0.1},
                {"stop": ("",)},
            ]
        )
    return SamplingParams(**values)


class Whim:
    """A processor and guard in one, as moody as its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.every = self.rng.randint(1, 9)

    def process(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        if self.rng.random() < 0.02:
            return torch.full_like(logits, -torch.inf)
        logits[self.rng.sample(range(300), self.rng.randrange(300))] = -torch.inf
        return logits

    def __call__(self, texts: Sequence[str]) -> list[Verdict]:
        return [self.rng.choice([None, None, None, "stop", "reject"]) for _ in texts]


def random_request(rng: random.Random, name: str, beginnings: list[list[int]]) -> Request:
    prompt = rng.choice(beginnings)[: rng.randrange(MAX_LENGTH + 10)] + [rng.randrange(303)] * rng.randrange(3)
    whim = Whim(rng.randrange(10**6))
    return Request(
        rng.choice(["", "ü/", "\U0001f600", "\x00"]) + name,
        prompt,
        random_params(rng),
        processors=(whim.process,) if rng.random() < 0.15 else (),
        guard=whim if rng.random() < 0.15 else None,
    )


def disturb(rng: random.Random, engine: EmbeddedEngine, waiting: dict[str, Request]) -> None:
    """What may happen between two steps."""
    if rng.random() < 0.05 and waiting:
        engine.abort([*rng.sample(sorted(waiting), min(3, len(waiting))), "unknown"])
    if rng.random() < 0.01:
        engine.load_shards(model_shards(engine.packed.model), engine.policy_version + 1)
    if rng.random() < 0.01:
        engine.sleep()
        engine.wake()


@pytest.mark.quick("roomy", "tight")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "blocks", "ahead"),
    [
        pytest.param(300, 14, False, id="tight"),
        pytest.param(300, 200, False, id="roomy"),
        pytest.param(300, 14, True, id="tight, as on a device"),
        pytest.param(300, 200, True, id="roomy, as on a device"),
        pytest.param(10_000, 14, False, id="ten thousand", marks=pytest.mark.slow),
    ],
)
def test_every_request_is_answered_or_refused_with_a_reason(
    packed64: PackedModel, tokenizer: PreTrainedTokenizerFast, count: int, blocks: int, ahead: bool
) -> None:
    rng = random.Random(blocks)
    engine = make_engine(packed64, tokenizer, blocks, ahead)
    assert engine.cache.num_blocks == blocks
    beginnings = [[rng.randrange(300) for _ in range(rng.choice([0, 3, 99, MAX_LENGTH]))] for _ in range(6)]
    waiting: dict[str, Request] = {}
    finishes: list[str] = []
    reasons: list[bool] = []
    for i in range(count):
        try:
            request = random_request(rng, str(i), beginnings)
            engine.add(request)
            waiting[request.id] = request
        except ConfigError as error:
            finishes.append("wrong parameters")
            reasons.append("must" in str(error))
        except RolloutError as error:
            finishes.append("refused")
            reasons.append(f"{i}'" in str(error))
        disturb(rng, engine, waiting)
        while engine.unfinished > 40 or (i == count - 1 and engine.unfinished):
            for sample in engine.step():
                request = waiting.pop(sample.id)
                finishes.append(sample.finish)
                room = MAX_LENGTH - len(request.prompt_tokens)
                assert len(sample.tokens) == len(sample.log_probs) <= min(request.params.max_new_tokens, room)
                assert all(0 <= token < 300 for token in sample.tokens)
                assert all(log_prob <= 1e-9 for log_prob in sample.log_probs)
                assert 0 <= sample.policy_version <= engine.policy_version
                assert (sample.text is not None) == bool(request.params.stop or request.guard)
    assert not waiting
    assert len(finishes) == count
    assert all(reasons)
    assert set(finishes) == {"stop", "length", "abort", "reject", "refused", "wrong parameters"}
    assert engine.cache.available == engine.cache.num_blocks
    assert not engine.scheduler.prompts
    assert (engine.scheduler.preemptions > 0) == (blocks == 14)
