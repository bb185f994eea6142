"""A step that fails loses nothing: what was in flight is drawn again, and every response gets the tokens that it would
have had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.models.packed import PackedModel
from verl.rollout.base import Request, Sample, SamplingParams, Verdict
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.embedded.kv_cache import KVCache

MakeModel = Callable[..., PreTrainedModel]
#: For four responses it is too few: some are preempted.
BLOCKS = 7


@dataclass
class FailsOnce:
    """A guard, or a hook of a module, that raises at one of its calls."""

    fails_at: int
    calls: int = 0
    every: int = 1

    def __call__(self, texts: Sequence[str], *_: Any) -> list[Verdict]:
        self.count()
        return [None] * len(texts)

    def count(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyError("at this call")


def engine_of(
    packed: PackedModel, tokenizer: PreTrainedTokenizerFast, blocks: int, *, invariant: bool = False
) -> EmbeddedEngine:
    size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype)
    return EmbeddedEngine(
        packed,
        eos_token_ids=(2,),
        seed=5,
        tokenizer=tokenizer,
        kv_memory=blocks * size,
        max_length=128,
        batch_invariant=invariant,
        compiled=False,
        look_ahead=True,
    )


def add_requests(engine: EmbeddedEngine, guard: FailsOnce) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for row in range(4):
        engine.add(Request(f"r{row}", list(range(5 + row, 30 + row)), params, guard=guard if row == 0 else None))


def rest_of(engine: EmbeddedEngine) -> dict[str, Sample]:
    """Whatever comes, in so many steps as it could take at the most."""
    samples = [sample for _ in range(500) if engine.unfinished for sample in engine.step()]
    assert not engine.unfinished
    return {sample.id: sample for sample in samples}


@pytest.mark.parametrize("where", ["forward", "step", "sleep", "load_shards"])
@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failure_at_any_token_changes_no_response(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, where: str, invariant: bool
) -> None:
    packed = PackedModel(make_model("llama"))
    whole = engine_of(packed, tokenizer, 400, invariant=invariant)
    add_requests(whole, FailsOnce(0))
    expected = {name: sample.tokens for name, sample in rest_of(whole).items()}
    for fails_at in (2, 8):  # at the eighth token a response is preempted, whose last one is in flight
        engine, fails = engine_of(packed, tokenizer, BLOCKS, invariant=invariant), FailsOnce(fails_at)
        add_requests(engine, fails if where != "forward" else FailsOnce(0))
        with ExitStack() as stack:
            if where == "forward":
                stack.callback(packed.model.get_input_embeddings().register_forward_pre_hook(fails.count).remove)
            stack.enter_context(pytest.raises(KeyError, match="at this call"))
            while engine.unfinished:
                if where in ("sleep", "load_shards") and fails.calls == fails_at - 1 and engine._pending:
                    engine.sleep() if where == "sleep" else engine.load_shards([], 0)
                engine.step()
        engine.wake()
        assert {name: sample.tokens for name, sample in rest_of(engine).items()} == expected
        assert engine.scheduler.preemptions and engine.cache.available == engine.cache.num_blocks


def test_a_prompt_token_is_not_taken_for_that_of_a_response(make_model: MakeModel) -> None:
    """There are as many tokens as draws when a response begins whose prompt is there, and another prompt goes on."""
    packed = PackedModel(make_model("llama"))
    found = []
    for step_tokens in (500, 1):
        engine = EmbeddedEngine(
            packed,
            eos_token_ids=(2,),
            seed=5,
            max_batch=3,
            kv_memory=8 << 20,
            step_tokens=step_tokens,
            compiled=False,
            look_ahead=True,
        )
        for name, length, new in (("a", 2, 20), ("b", 2, 3), ("long", 40, 6), ("c", 2, 6)):
            params = SamplingParams(max_new_tokens=new, ignore_eos=True)
            engine.add(Request(name, list(range(7, 7 + length)), params))
        found.append({name: sample.tokens for name, sample in rest_of(engine).items()})
    assert found[0] == found[1]
