"""vLLM asleep: its weights are dropped, and none are served before they have been sent again.

The CPU build cannot sleep: a stand-in for a build that can computes, and drops its weights.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import verl
from tests.rollout.stand_in_vllm import LLM, modules
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.choice import RUNNER
from verl.rollout.vllm.engine import NoWeightsError, VLLMEngine
from verl.weights.shard import Shard
from verl.weights.shards import model_shards

WAKING = ["wake weights", "update", "wake kv_cache"]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNER, "")
    monkeypatch.delenv(RUNNER)  # what the engine sets is undone
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def model(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_model("llama", torch.float32)


@pytest.fixture
def engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> VLLMEngine:
    """With the model's weights as version 3."""
    made = VLLMEngine(model, tokenizer, eos_token_ids=(2,), seed=0, kv_memory=1 << 20)
    made.load_shards(model_shards(model), 3)
    return made


def request(name: str) -> Request:
    return Request(name, [5, 9, 30], SamplingParams(max_new_tokens=3, temperature=0.0))


def test_weights_are_dropped_and_come_before_the_cache(engine: VLLMEngine, model: PreTrainedModel) -> None:
    (before,) = generate(engine, [request("a")])
    engine.sleep()
    engine.sleep()
    engine.wake()
    assert LLM.made[0].calls == ["update", "sleep 2"] and not LLM.made[0].memory
    engine.load_shards(model_shards(model), 4)
    assert LLM.made[0].calls[2:] == WAKING
    (after,) = generate(engine, [request("b")])
    assert (after.tokens, before.policy_version, after.policy_version) == (before.tokens, 3, 4)


def test_without_weights_nothing_is_served(engine: VLLMEngine, model: PreTrainedModel) -> None:
    engine.sleep()
    engine.wake()
    assert engine.lacks_weights
    for use in (lambda: engine.add(request("a")), engine.step, lambda: engine.score([5], [6])):
        with pytest.raises(NoWeightsError, match="dropped its weights in its sleep"):
            use()
    engine.load_shards(model_shards(model), 3)
    with torch.no_grad():
        expected = model(torch.tensor([[5, 9]])).logits[0, -1].log_softmax(-1)[30].item()
    assert engine.policy_version == 3 and engine.score([5, 9], [30]) == pytest.approx([expected], abs=1e-5)


def test_the_model_runner_with_log_probs_at_every_temperature_is_chosen(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """V2, which vLLM takes by itself on a GPU, has another sampler, that the worker does not take for its own."""
    with caplog.at_level(logging.INFO, "verl"):
        for version in (1, 2):
            engine = VLLMEngine(model, tokenizer, eos_token_ids=(2,), seed=0, kv_memory=1 << 20)
            engine.load_shards(model_shards(model), version)
            engine.add(Request("a", [5, 9, 30], SamplingParams(max_new_tokens=3, temperature=0.7)))
            assert len(engine.step()) == 1
    assert os.environ[RUNNER] == "0", "vLLM asks for it again while it runs"
    assert caplog.text.count("vLLM takes its model runner V1") == 1


def test_another_model_runner_is_refused_before_the_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNNER, "1")
    with pytest.raises(ConfigError, match=f"{RUNNER}=1 asks vLLM for model runner V2"):
        VLLMEngine(model, tokenizer, eos_token_ids=(2,), seed=0, kv_memory=1 << 20)
    assert not LLM.made


def test_with_requests_in_work_it_does_not_sleep(engine: VLLMEngine) -> None:
    engine.add(request("a"))
    engine.sleep()
    assert LLM.made[0].calls == ["update"] and engine.step()


@pytest.mark.parametrize("fault", ["stream", "later", "end"])
def test_an_update_that_fails_in_its_sleep_can_be_made_again(
    engine: VLLMEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Nothing was served that could be half replaced."""
    monkeypatch.setattr("verl.weights.shard.BUNCH", 1 << 12)
    engine.sleep()

    def stream() -> Iterator[Shard]:
        shards = list(model_shards(model))
        yield from shards[: {"stream": 0, "later": 3, "end": len(shards)}[fault]]
        if fault != "end":
            raise OSError("the trainer's disk is gone")

    LLM.made[0].broken = fault == "end"
    with pytest.raises((OSError, RolloutError)):
        engine.load_shards(stream(), 4)
    assert engine.lacks_weights
    if fault == "end":  # all was sent: what vLLM has is unknown
        with pytest.raises(RolloutError, match="not used again"):
            engine.step()
        return
    with pytest.raises(NoWeightsError):
        engine.step()
    engine.sleep()
    engine.load_shards(model_shards(model), 4)
    assert LLM.made[0].memory == {"weights", "kv_cache"} and list(generate(engine, [request("a")]))


def test_an_update_that_vllm_ignores_is_seen(
    engine: VLLMEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the version is the one that was served before the sleep."""
    engine.sleep()
    monkeypatch.setattr(LLM, "update_weights", lambda self, request: None)
    monkeypatch.setattr(LLM, "finish_weight_update", lambda self, version: None)
    with pytest.raises(RolloutError, match=r"serves weights of versions \{None\}, not 3"):
        engine.load_shards(model_shards(model), 3)


def test_an_actor_sends_weights_after_every_sleep(tiny: Path) -> None:
    """Before each rollout, also where there was no update since the last, and for the measurement before the first."""
    actor: Any = verl.Actor(str(tiny), rollout="vllm", optim={"lr": 1e-2}, sampling={"max_new_tokens": 4})
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [float(len(text)) for text in texts], n=2, log_dir=False)
    for step in range(2):
        metrics = trainer.step(["Once upon a time", "In the beginning"])
        assert metrics["sync/mismatch/max"] < 1e-3, step
        actor.generate_sequences(["One more"])
        rows = actor.generate_sequences(["And another"])
        assert set(rows["policy_version"]) == {step + 1}
    (llm,) = LLM.made
    # The first rollout ends, and the measurement; then each update, and each rollout without one before it.
    assert llm.calls == ["update", *6 * ["sleep 2", *WAKING], "sleep 2"]
    assert not llm.memory and llm.served is None
