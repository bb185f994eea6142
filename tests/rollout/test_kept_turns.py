"""Turns of an episode share what was computed for the turns before, to the token: each token is prefilled once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.rollout.conftest import SIZES
from tests.rollout.test_exactness import plain_log_probs
from tests.templates import TOOL_FAMILIES
from verl.models.packed import PackedModel
from verl.rollout.base import Request, Sample, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.episode import Client, run_episodes
from verl.rollout.gateway.gateway import EpisodeRecord, Gateway
from verl.rollout.turns import Turns

MakeModel = Callable[..., PreTrainedModel]


class Watched(EmbeddedEngine):
    """Keeps what it was asked and what it answered."""

    def add(self, request: Request) -> None:
        vars(self).setdefault("requests", {})[request.id] = request
        super().add(request)

    def step(self) -> list[Sample]:
        done = super().step()
        vars(self).setdefault("samples", {}).update({sample.id: sample for sample in done})
        return done

    @property
    def pairs(self) -> list[tuple[Request, Sample]]:
        requests, samples = vars(self)["requests"], vars(self)["samples"]
        return [(requests[name], sample) for name, sample in samples.items()]


def make_engine(packed: PackedModel, blocks: int = 1000, **options: Any) -> Watched:
    size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype)
    return Watched(packed, eos_token_ids=(2,), seed=3, kv_memory=blocks * size, **options)


def new_tokens(pairs: Sequence[tuple[Request, Sample]]) -> int:
    """How many tokens must be prefilled if each is once: the prompts' beginnings of each length that differ, but for
    those whose last token the policy sampled and computed, which is all of a response but its last token."""
    needed, computed = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for request, sample in pairs:
        prompt = tuple(request.prompt_tokens)
        needed |= {prompt[: length + 1] for length in range(len(prompt))}
        computed |= {(*prompt, *sample.tokens[: length + 1]) for length in range(len(sample.tokens) - 1)}
    return len(needed - computed)


def check_log_probs(model: PreTrainedModel, pairs: Sequence[tuple[Request, Sample]]) -> None:
    for request, sample in pairs[:: max(1, len(pairs) // 8)]:
        expected = plain_log_probs(model, request, sample)
        torch.testing.assert_close(torch.tensor(sample.log_probs, dtype=expected.dtype), expected, atol=1e-9, rtol=0)


@pytest.mark.quick("kernels")
@pytest.mark.parametrize(
    ("compiled", "look_ahead"),
    [pytest.param(True, False, id="kernels"), (False, False), pytest.param(False, True, id="ahead")],
)
@torch.no_grad()
def test_turns_prefill_what_is_new(make_model: MakeModel, compiled: bool, look_ahead: bool) -> None:
    model = make_model("llama")
    engine = make_engine(PackedModel(model), compiled=compiled, look_ahead=look_ahead, step_tokens=50)
    rng, params = random.Random(5), SamplingParams(max_new_tokens=7)
    expected = 0

    async def episode(client: Client, row: Mapping[str, Any]) -> list[Turns]:
        nonlocal expected
        tokens, turns = list(row["prompt_tokens"]), Turns()
        expected += len(tokens)
        for _ in range(12):
            sample = await client.generate(tokens)
            turns.wrote(sample)
            read = [rng.randrange(3, 300) for _ in range(rng.randrange(12))]
            tokens += [*sample.tokens, *read]
            expected += 1 + len(read)  # the last token that was sampled, and what stands behind it
        await client.generate(tokens)
        return [turns]

    async def play() -> None:
        rows = [{"id": str(row), "prompt_tokens": [row + 3, *range(10, 10 + 17 * row)]} for row in range(4)]
        assert [outcome.error async for outcome in run_episodes(engine, rows, params, episode)] == [None] * 4

    asyncio.run(play())
    if look_ahead:  # the last token was computed by the step that was launched before the host saw it
        assert expected - 4 * 12 <= engine.scheduler.prompt_tokens <= expected
    else:
        assert engine.scheduler.prompt_tokens == expected == new_tokens(engine.pairs)
    assert engine.cache.available == engine.cache.num_blocks and not engine.scheduler.preemptions
    check_log_probs(model, engine.pairs)


@pytest.mark.quick("40")
@pytest.mark.parametrize("step_tokens", [2048, 40])
@torch.no_grad()
def test_forks_prefill_what_is_new(make_model: MakeModel, step_tokens: int) -> None:
    """Several turns behind one, one after the other and at once, that go on alike for a while."""
    model = make_model("llama")
    engine = make_engine(PackedModel(model), step_tokens=step_tokens)
    params = SamplingParams(max_new_tokens=9)

    async def episode(client: Client, row: Mapping[str, Any]) -> list[Turns]:
        tokens = list(row["prompt_tokens"])
        for turn in range(4):
            sample = await client.generate(tokens)
            behind = [*tokens, *sample.tokens]
            forks = [[*behind, *range(20, 20 + 8 * turn), fork, *range(100, 100 + 9 * fork)] for fork in range(5, 10)]
            await client.generate(forks[0])
            await asyncio.gather(*(client.generate(fork) for fork in (forks[1], behind, *forks[2:])))
            tokens = forks[3]
        return [Turns().wrote(sample)]

    async def play() -> None:
        rows = [{"id": str(row), "prompt_tokens": [*range(10, 10 + 30 * (row + 1)), row]} for row in range(3)]
        assert [outcome.error async for outcome in run_episodes(engine, rows, params, episode)] == [None] * 3

    asyncio.run(play())
    # Of a prompt that an earlier one begins with, the last token is computed again, for its state is needed: of each
    # turn that nothing was written behind, and of three forks that were asked for again.
    again = 3 * (4 + 3)
    assert engine.scheduler.prompt_tokens - again == new_tokens(engine.pairs)
    check_log_probs(model, engine.pairs)


@pytest.mark.slow
@torch.no_grad()
def test_what_is_kept_makes_room_and_is_gone_with_the_weights(make_model: MakeModel) -> None:
    model = make_model("llama")
    params, prompt = SamplingParams(max_new_tokens=20, temperature=1.1), list(range(10, 50))
    for blocks in (1000, 9):
        engine = make_engine(PackedModel(model), blocks)
        rng, tokens = random.Random(0), prompt
        for turn in range(12):
            if turn == 6:
                with torch.no_grad():
                    model.lm_head.weight.mul_(1.01)  # type: ignore[operator]
                before = engine.scheduler.prompt_tokens
            (sample,) = generate(engine, [Request(str(turn), tokens, params, is_turn=True)])
            check_log_probs(model, [engine.pairs[-1]])
            if turn == 6:
                assert engine.scheduler.prompt_tokens - before == len(tokens)
            tokens = [*tokens, *sample.tokens, *(rng.randrange(3, 300) for _ in range(3))][-200:]
        assert engine.cache.available == engine.cache.num_blocks


@pytest.mark.parametrize("is_turn", [True, False])
@torch.no_grad()
def test_batch_invariant_turns_share_prompts_alone(make_model: MakeModel, is_turn: bool) -> None:
    """What a response computed differs by rounding from what a prompt does, and would tell whether it was kept."""
    packed, params = PackedModel(make_model("llama", torch.float32)), SamplingParams(max_new_tokens=20)
    engine = make_engine(packed, batch_invariant=True)
    (first,) = generate(engine, [Request("a", list(range(10, 50)), params, is_turn=is_turn)])
    tokens = [*range(10, 50), *first.tokens, 7, 8]
    before = engine.scheduler.prompt_tokens
    (kept,) = generate(engine, [Request("b", tokens, params, is_turn=is_turn)])
    assert engine.scheduler.prompt_tokens - before == (len(first.tokens) + 2 if is_turn else len(tokens) - 32)
    (alone,) = generate(make_engine(packed, batch_invariant=True), [Request("b", tokens, params)])
    assert (kept.tokens, kept.log_probs) == (alone.tokens, alone.log_probs)


def alike(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])


@pytest.mark.slow
@torch.no_grad()
def test_an_agent_of_128_turns_with_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the gateway: of each turn what the agent added is prefilled, and the last token that was sampled before
    it; of a second turn behind the same one only what differs from the first."""
    pytest.importorskip("aiohttp")
    tokenizer = TOOL_FAMILIES["qwen2.5"].make()
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 8192})
    model = LlamaForCausalLM(config).double().eval()
    engine = make_engine(PackedModel(model), 600, tokenizer=tokenizer)
    records: list[EpisodeRecord] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        auth = {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(base_url=base_url, headers=auth, timeout=60) as client:

            def ask(chat: list[Any], text: str) -> list[Any]:
                asked = [*chat, {"role": "user", "content": text}]
                body = {"model": "any", "messages": asked, "max_tokens": 5}
                return [*asked, client.post("/chat/completions", json=body).json()["choices"][0]["message"]]

            chat: list[Any] = []
            for turn in range(128):
                later = ask(chat, f"Why {turn}?")
                if turn % 32 == 9:
                    ask(chat, f"Why is it {turn}?")
                chat = later
        return 1.0

    gateway = Gateway(agent)
    real = gateway.run

    async def run(client: Any, row: Any) -> EpisodeRecord:
        records.append(await real(client, row))
        return records[-1]

    async def play() -> None:
        rows, params = [{"id": "a", "prompt_tokens": [1]}], SamplingParams(max_new_tokens=5)
        episodes = run_episodes(engine, rows, params, gateway, tokenizer=tokenizer)
        assert [outcome.error async for outcome in episodes] == [None]

    monkeypatch.setattr(gateway, "run", run)
    asyncio.run(play())
    calls = records[0].calls
    assert len(calls) == 132 and [len(each.calls) for each in records[0].trajectories] == [128, 1, 1, 1, 1]
    expected, reads = 0, dict[Any, list[list[int]]]()
    for call in calls:
        # -1: nothing has gone on behind it, so the last token that was sampled is to be computed too.
        before = reads.setdefault(call.prompt.parent, [])
        shared = max((alike(read, call.prompt.read) for read in before), default=-1)
        expected += len(call.prompt.read) - shared - (call.prompt.parent is None)
        before.append(call.prompt.read)
    assert engine.scheduler.prompt_tokens == expected and not engine.scheduler.preemptions
    assert sum(len(sample.tokens) for _, sample in engine.pairs) == sum(len(call.sample.tokens) for call in calls)
    check_log_probs(model, [engine.pairs[9], engine.pairs[10], engine.pairs[-1]])
