"""Generation's path on a GPU, with a plain stand-in for the kernel, against the path of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.rollout.test_exactness import run
from tests.varlen import varlen_attn
from tests.waits import no_waits, unwatched
from verl.device import to_host
from verl.models import varlen
from verl.models.packed import PackedModel
from verl.rollout import embedded, kv_cache, response
from verl.rollout.base import Request, SamplingParams
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.kv_cache import KVCache

MakeModel = Callable[..., PreTrainedModel]


def random_requests(rng: random.Random) -> list[Request]:
    """Prompts with common beginnings, some with several samples; greedy and sampled."""
    beginning = [rng.randrange(3, 300) for _ in range(40)]
    requests = []
    for i in range(rng.randint(3, 6)):
        prompt = beginning[: rng.choice([0, 0, 17, 40])] + [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(max_new_tokens=rng.randint(1, 30), temperature=rng.choice([0, 0, 1.0]))
        requests += [Request(f"{i}/{j}", prompt, params) for j in range(rng.choice([1, 1, 4]))]
    return requests


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_tokens_and_log_probs_are_those_of_the_cpu(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """Over shared prompts, chunked prefill, preemption, sliding windows and fewer heads of keys than of queries."""
    rng = random.Random(f"{kind} {seed}")
    packed = PackedModel(make_model(kind))
    requests, step_tokens, blocks = random_requests(rng), rng.choice([5, 29, 500]), rng.choice([14, 400])
    expected = run(EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20), requests)
    calls = []

    def kernel(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(kwargs["block_table"])
        return varlen_attn(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(varlen, "flash_attention", lambda value: kernel)
    for module in (kv_cache, embedded):
        monkeypatch.setattr(module, "block_tokens", lambda device: 16)
    size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype, 16)
    engine = EmbeddedEngine(
        packed, eos_token_ids=(2,), seed=3, kv_memory=blocks * size, step_tokens=step_tokens, compiled=False
    )
    assert engine.cache.block == 16
    samples = run(engine, requests)
    assert calls
    assert engine.cache.available == engine.cache.num_blocks == blocks
    for name, sample in expected.items():
        assert samples[name].tokens == sample.tokens
        assert samples[name].log_probs == pytest.approx(sample.log_probs, abs=1e-10)


def test_blocks_are_as_large_as_flash_attention_reads_them() -> None:
    assert kv_cache.block_tokens(torch.device("cuda:1")) == 256
    assert kv_cache.block_tokens(torch.device("cpu")) == kv_cache.BLOCK


def test_a_decode_step_copies_to_the_host_once_and_waits_for_nothing_else(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedModel(make_model("llama"))
    monkeypatch.setattr(varlen, "flash_attention", lambda value: unwatched(varlen_attn))
    copies = []

    def counted(*columns: torch.Tensor) -> list[list[float]]:
        copies.append(len(columns))
        host: list[list[float]] = unwatched(to_host)(*columns)
        return host

    monkeypatch.setattr(response, "to_host", counted)
    engine = EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20, compiled=False)
    ways = [{"temperature": 0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.01}]
    for i, way in enumerate(ways):
        engine.add(Request(str(i), [5, 6, 7 + i], SamplingParams(max_new_tokens=8, ignore_eos=True, **way)))
    engine.step()  # of the prompts
    copies.clear()
    with no_waits():
        for _ in range(5):
            engine.step()
    assert copies == [2] * 5
