"""Grammars in vLLM, which has its own masks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import verl
from verl.errors import RolloutError
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.grammar import Grammar

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"


def test_vllm_keeps_to_the_grammar_and_gives_the_log_probs_of_the_model(make_tiny: Callable[..., Path]) -> None:
    episode = ConstrainedEpisode(grammar=Grammar.regex(DATE), max_resamples=0)
    sampling = SamplingParams(max_new_tokens=16)
    actor = verl.Actor.from_pretrained(
        str(make_tiny("wide")), rollout="vllm", episode=episode, sampling=sampling, max_num_seqs=16, kv_cache_gb=0.01
    )
    rows = actor.generate_sequences(["A", "The"], n=4)
    assert set(rows["finish"]) == {"stop"}
    assert all(re.fullmatch(DATE, text) for text in rows["response"]), rows["response"]
    again = actor.compute_log_probs(rows)["log_probs"]
    for engine, trainer in zip(rows["rollout_log_probs"], again, strict=True):
        assert engine == pytest.approx(trainer, abs=1e-3)
    # What a stop string cuts off is not whole.
    vllm, prompt = actor.group.worker.rollout_engine, actor.tokenizer("A")["input_ids"]
    vllm.wake()
    params = SamplingParams(max_new_tokens=16, stop=("-",))
    cut = [Request("a", prompt, params, grammar=Grammar.regex(DATE))]
    cut += [Request("b", prompt, params, grammar=Grammar.regex("-[0-9]"))]
    got = {sample.id: (sample.finish, len(sample.text or "")) for sample in generate(vllm, cut)}
    assert got == {"a": ("length", 4), "b": ("length", 0)}
    # A response that is whole, and only being scored, keeps its id, and an abort does not lose it.
    vllm.add(Request("c", prompt, SamplingParams(max_new_tokens=16), grammar=Grammar.regex(DATE)))
    while not vllm._scoring:
        assert vllm.step() == []
    with pytest.raises(RolloutError, match="ids must differ"):
        vllm.add(Request("c", prompt))
    vllm.abort(["c"])
    (kept,) = vllm.step()
    assert (kept.id, kept.finish, vllm.unfinished) == ("c", "stop", 0)
    assert len(kept.tokens) == len(kept.log_probs) > 0
    vllm.close()
