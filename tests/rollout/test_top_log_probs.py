"""Log-probs of the likeliest tokens at each place: of the very distribution that the sampled token's own is of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import verl
from tests.rollout.test_gateway_server import HELLO, Run, asking, post
from tests.rollout.test_tools import Scripted
from verl.models.packed import PackedModel
from verl.rollout.base import Request, Sample, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.episode import Client, run_episodes
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.hf import HFEngine
from verl.rollout.turns import Turns

ENGINES = ["kernels", "torch", "ahead", "hf"]
Tops = list[list[tuple[int, float]]]


def make_engine(kind: str, packed: PackedModel, tokenizer: PreTrainedTokenizerFast) -> Any:
    if kind == "hf":
        return HFEngine(packed.model, tokenizer, eos_token_ids=(2,), seed=0, max_batch=4)
    options: Any = {"compiled": kind == "kernels", "look_ahead": kind == "ahead", "kv_memory": 8 << 20}
    return EmbeddedEngine(packed, eos_token_ids=(2,), seed=0, tokenizer=tokenizer, **options)


@torch.no_grad()
def plain(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float, count: int) -> Tops:
    """From one forward of transformers."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    top = (logits / (temperature or 1.0)).log_softmax(-1).topk(min(count, logits.shape[1]))
    return [[*zip(*row, strict=True)] for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def raised(tokens: Any, logits: Tensor) -> Tensor:
    logits[7] += 3.0  # in place
    logits[9] = -torch.inf
    return logits


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    "least length": {"min_new_tokens": 8, "stop_token_ids": (5, 6, 8)},
}


@pytest.mark.parametrize("kind", ENGINES)
def test_they_are_those_of_the_model(kind: str, packed64: PackedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    requests = {
        name: Request(name, [5, 6, 7 + number], SamplingParams(max_new_tokens=12, **fields), top_log_probs=4)
        for number, (name, fields) in enumerate(PARAMS.items())
    }
    requests["edited"] = Request("edited", [9, 9], SamplingParams(max_new_tokens=12), (raised,), top_log_probs=3)
    requests["all"] = Request("all", [9, 8], SamplingParams(max_new_tokens=3), top_log_probs=1000)
    requests["none"] = Request("none", [9, 7], SamplingParams(max_new_tokens=3))
    samples = {sample.id: sample for sample in generate(make_engine(kind, packed64, tokenizer), requests.values())}
    assert len(samples) == len(requests) and samples["none"].top_log_probs == []
    for name, request in requests.items():
        sample, count = samples[name], request.top_log_probs
        if count:
            tops = plain(packed64.model, [*request.prompt_tokens], sample.tokens, request.params.temperature, count)
            check(sample, tops)


def check(sample: Sample, expected: Tops) -> None:
    assert len(sample.top_log_probs) == len(sample.tokens) == len(sample.log_probs) > 0
    for tops, wanted, token, log_prob in zip(
        sample.top_log_probs, expected, sample.tokens, sample.log_probs, strict=True
    ):
        assert [token_ for token_, _ in tops] == [token_ for token_, _ in wanted]
        assert [number for _, number in tops] == pytest.approx([number for _, number in wanted], abs=1e-9)
        assert dict(tops).get(token, log_prob) == log_prob  # of one that was sampled the same number, to the last bit


@pytest.mark.parametrize("kind", ENGINES)
def test_samples_are_as_without_them(kind: str, packed64: PackedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    both = []
    for count in (0, 2):
        requests = [Request(str(n), [5, 6, 7 + n], SamplingParams(max_new_tokens=9), top_log_probs=count * (n % 2))
                    for n in range(4)]  # fmt: skip
        done = generate(make_engine(kind, packed64, tokenizer), requests)
        both.append({sample.id: (sample.tokens, sample.log_probs, sample.finish) for sample in done})
    assert both[0] == both[1] and len(both[0]) == 4


def test_a_grammar_moves_the_token_and_not_the_distribution(make_model: Callable[..., PreTrainedModel]) -> None:
    """The one in the place of a token that is not allowed has its own log-prob, and so have the others."""
    pytest.importorskip("xgrammar")
    from tests.conftest import byte_tokenizer
    from verl.rollout.grammar import Grammar

    tokenizer, packed = byte_tokenizer(), PackedModel(make_model("llama"))
    engine = EmbeddedEngine(packed, eos_token_ids=(0,), seed=0, tokenizer=tokenizer, kv_memory=8 << 20)
    params = SamplingParams(max_new_tokens=20, temperature=0.8)
    request = Request("x", [40, 41], params, grammar=Grammar.regex("[ab]{6}"), top_log_probs=5)
    (sample,) = generate(engine, [request])
    assert set(tokenizer.decode(sample.tokens).removesuffix("<|end|>")) <= {"a", "b"} and len(sample.tokens) >= 6
    check(sample, plain(packed.model, [40, 41], sample.tokens, 0.8, 5))


class Silent(Scripted):
    """Knows the log-probs of sampled tokens alone."""

    tells_top = False


def test_an_engine_that_cannot_refuses_by_name() -> None:
    pytest.importorskip("aiohttp")
    seen: list[Any] = []
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    run = Run(asking(seen, body, {**body, "top_logprobs": 0}), engine=Silent)
    error = seen[0].json()["error"]
    assert (seen[0].status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "top_logprobs")
    assert "log-probs of sampled tokens alone: use the engine embedded or hf" in error["message"]
    assert seen[1].status_code == 200 and len(run.engine.requests) == 1 and run.outcome.error is None


def test_an_episode_that_asks_such_an_engine_fails_by_name(tokenizer: PreTrainedTokenizerFast) -> None:
    async def episode(client: Client, row: Mapping[str, Any]) -> list[Turns]:
        return [Turns().wrote(await client.generate(row["prompt_tokens"], top_log_probs=1))]

    async def play() -> Any:
        rows = [{"id": "a", "prompt_tokens": [1]}]
        (outcome,) = [o async for o in run_episodes(Silent(tokenizer, ["x"]), rows, SamplingParams(), episode)]
        return outcome

    assert "sampled tokens alone" in str(asyncio.run(play()).error)


def events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(each) for each in data]


def test_clients_get_them(tiny: Path) -> None:
    """Of both dialects of OpenAI, whole and streamed, under a real engine."""
    pytest.importorskip("aiohttp")
    seen: list[Any] = []
    chat, responses = {"messages": HELLO, "logprobs": True, "top_logprobs": 3}, {"input": "Hello.", "top_logprobs": 3}

    def agent(base_url: str, api_key: str, row: Any) -> float:
        for path, body in (("/chat/completions", chat), ("/responses", responses)):
            seen.append(post(base_url, api_key, body, path).raise_for_status().json())
            seen.append(events(post(base_url, api_key, {**body, "stream": True}, path).raise_for_status().text))
        return 1.0

    sampling = {"max_new_tokens": 6, "temperature": 0.8}
    actor = verl.Actor.from_pretrained(
        str(tiny), dtype="float64", episode=Gateway(agent, chat_template="hermes"), sampling=sampling
    )
    rows = list(actor.generate_sequences(["Once"], key="k").rows())
    whole, chunks, response, deltas = seen
    (last,) = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    (done,) = [event for event in deltas if event["type"] == "response.output_text.done"]
    answers = [
        whole["choices"][0]["logprobs"]["content"], last["content"],
        response["output"][0]["content"][0]["logprobs"], done["logprobs"],
    ]  # fmt: skip
    assert len(rows) == 4
    for row, tokens in zip(rows, answers, strict=True):
        assert [token["logprob"] for token in tokens] == pytest.approx(row["rollout_log_probs"], abs=1e-12)
        wanted = plain(actor.model, row["prompt_tokens"], row["response_tokens"], 0.8, 3)
        for token, tops in zip(tokens, wanted, strict=True):
            shown = [(top["token"], top["logprob"]) for top in token["top_logprobs"]]
            texts = [actor.tokenizer.decode([number]) for number, _ in tops]
            assert [text for text, _ in shown] == texts
            assert [number for _, number in shown] == pytest.approx([number for _, number in tops], abs=1e-9)
