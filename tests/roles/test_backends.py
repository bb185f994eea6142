"""Actors over named engines, workers over running ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl
import verl.worker
from tests.conftest import Plain
from verl.errors import ConfigError, ModelError
from verl.rollout.base import SamplingParams

SHORT = SamplingParams(max_new_tokens=5)
PROMPTS = ["Once upon a time", "In the beginning"]


def test_hugging_face_workers_are_actors(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for actor in (
        verl.HuggingFaceWorker(str(tiny), sampling=SHORT),
        verl.HfModelAdapter(model, tokenizer, sampling=SHORT, optim={"lr": 1e-2}),
        verl.worker.ActorRolloutRefWorker(model_path=str(tiny), max_batch_size=4, rollout_backend="hf", sampling=SHORT),
    ):
        sequences = actor.generate_sequences(PROMPTS, n=2)
        assert len(sequences) == 4
        before = actor.compute_ref_log_probs(sequences)["ref_log_probs"]
        actor.update(sequences, [1.0, 0.0, 0.5, 0.0])
        after = actor.compute_ref_log_probs(sequences)["ref_log_probs"]
        assert [x for row in after for x in row] == pytest.approx([x for row in before for x in row])
    assert actor.tokenizer.eos_token_id == tokenizer.eos_token_id


def test_what_a_model_lacks_is_named() -> None:
    with pytest.raises(
        ModelError, match="Linear is no causal language model of transformers: it has no generate, config"
    ):
        verl.HfModelAdapter(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="it has no generate"):
        verl.vLLMAdapter(object())

    class Synchronous:
        def generate(self, prompts: list[str], sampling_params: Any = None) -> list[str]:
            return prompts

    with pytest.raises(ModelError, match="the generate of a Synchronous is not vLLM's asynchronous one"):
        verl.vLLMAdapter(Synchronous())


def test_adapters_keep_the_callers_model_and_tokenizer(tiny: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    adapter = verl.HfModelAdapter(model, tokenizer)
    assert adapter.model is model and adapter.tokenizer is tokenizer


def test_a_worker_generates_through_a_server(serve: Callable[..., Plain], tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    worker = verl.vLLMWorker(api_url=f"{serve(1).url}/generate", tokenizer=tokenizer, sampling=SHORT)
    sequences = worker.generate_sequences(PROMPTS, n=3)
    assert [len(tokens) for tokens in sequences["response_tokens"]] == [5] * 6
    assert sequences["response"][0] == tokenizer.decode(sequences["response_tokens"][0])
    assert sequences["group"][0] == sequences["group"][2] != sequences["group"][3]
    assert sequences["rollout_log_probs"][0] == [-1.0] * 5
    rewards = verl.Reward(lambda texts: [float(len(t)) for t in texts]).get_reward(sequences)
    assert all(reward is not None for reward in rewards["reward"])
    with pytest.raises(ConfigError, match="needs the served model's tokenizer"):
        verl.vLLMWorker(api_url="http://127.0.0.1:1").generate_sequences(PROMPTS)


def test_servers_serve_an_actors_weights(serve: Callable[..., Plain], tiny: Path) -> None:
    """The plain server takes versions and writes what no model would: that is seen before the first update."""
    actor = verl.Actor(str(tiny), rollout=verl.vLLMWorker(api_url=serve(1).url), sampling=SHORT)
    sequences = actor.generate_sequences(PROMPTS, n=2)
    assert set(sequences["finish"]) == {"length"}
    assert set(sequences["policy_version"]) == {0}


def test_a_killed_server_costs_samples_not_the_run(serve: Callable[..., Plain], tiny: Path) -> None:
    class Killing:
        def __init__(self, server: Plain) -> None:
            self.server = server

        def __call__(self, texts: list[str]) -> list[float]:
            self.server.kill()
            return [float(len(text)) for text in texts]

    first, second = serve(1), serve(2)
    worker = verl.vLLMWorker(api_url=[first.url, second.url], retries=2)
    actor = verl.Actor(str(tiny), rollout=worker, sampling=SHORT)
    kill: Any = Killing(first)
    for _ in range(2):
        sequences = actor.generate_sequences(PROMPTS, n=4)
        assert set(sequences["finish"]) == {"length"}
        assert verl.Reward(kill).get_reward(sequences)["reward"].count(None) == 0
    assert {row[0] for row in sequences["rollout_log_probs"]} == {-2.0}
