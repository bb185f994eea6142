"""Generation's path on a GPU, with a plain stand-in for the kernel, against the path of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import recording
from tests.rollout.test_exactness import run
from tests.varlen import PAGE, varlen_attn
from tests.waits import no_waits, unwatched
from verl._host import device
from verl._host.device import HostCopy
from verl.attention import flash
from verl.models.packed import PackedModel
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.embedded import attention, kv_cache, sampler
from verl.rollout.embedded import engine as embedded
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.embedded.scheduler import ScheduledBatch
from verl.rollout.grammar import Grammar, GrammarMask

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


def as_device(monkeypatch: pytest.MonkeyPatch, page: int = 16) -> list[dict[str, Any]]:
    """Take the CPU for a device with flash attention, CUDA graphs, and numbers that the host waits for. Returns what
    the calls to come are given by name; 16 tokens a page make short sequences take several."""
    calls: list[dict[str, Any]] = []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return varlen_attn(*args, **kwargs, page=page)

    take(monkeypatch, noted)
    monkeypatch.setattr(device, "recorded", recording.recorded)
    for module in (attention, embedded, sampler):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    monkeypatch.setattr(embedded, "block_tokens", lambda device: page)
    return calls


def take(monkeypatch: pytest.MonkeyPatch, function: Callable[..., torch.Tensor]) -> None:
    """Take a function of the kernel's arguments for the kernel."""
    kernel = recording.kernel(function)
    kernel.__kwdefaults__ = {"num_splits": None}  # by which it is known what torch's kernel can do

    def flash_attention(value: torch.Tensor, *, paged: bool = False) -> Callable[..., torch.Tensor]:
        assert paged
        return kernel

    monkeypatch.setattr(flash, "flash_attention", flash_attention)


@pytest.mark.quick("ahead-gpt2-1", "in turn-mistral-1")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("ahead", [None, False], ids=["ahead", "in turn"])
def test_tokens_and_log_probs_are_those_of_the_cpu(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, ahead: bool | None
) -> None:
    """Over shared prompts, chunked prefill, preemption, sliding windows and fewer heads of keys than of queries."""
    rng = random.Random(f"{kind} {seed}")
    packed = PackedModel(make_model(kind))
    requests, step_tokens, blocks = random_requests(rng), rng.choice([5, 29, 500]), rng.choice([14, 400])
    expected = run(EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20), requests)
    calls = as_device(monkeypatch)
    size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype, 16)
    engine = EmbeddedEngine(
        packed,
        eos_token_ids=(2,),
        seed=3,
        kv_memory=blocks * size,
        step_tokens=step_tokens,
        compiled=False,
        look_ahead=ahead,
    )
    assert engine.cache.block == 16 and engine.options.look_ahead == (ahead is None)
    samples = run(engine, requests)
    assert calls
    assert engine.cache.available == engine.cache.num_blocks == blocks
    for name, sample in expected.items():
        assert samples[name].tokens == sample.tokens
        assert samples[name].log_probs == pytest.approx(sample.log_probs, abs=1e-10)


@pytest.mark.quick("-mistral", "batch-invariant-llama")
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_pages_are_as_large_and_keys_as_whole_as_the_kernel_wants_them(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kind: str, invariant: bool
) -> None:
    """The query heads of a group share their keys in a decode step without a window, and only then may torch split
    them; where no number is to depend on the others each call takes the same kernel."""
    packed = PackedModel(make_model(kind))
    settings: dict[str, Any] = {"eos_token_ids": (2,), "seed": 3, "kv_memory": 64 << 20, "batch_invariant": invariant}
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [list(range(5, 5 + length)) for length in (250, 3)]
    requests = [Request(f"{i}/{j}", prompt, params) for i, prompt in enumerate(prompts) for j in range(2)]
    expected = run(EmbeddedEngine(packed, **settings), requests)
    calls = as_device(monkeypatch, page=PAGE)
    samples = run(EmbeddedEngine(packed, compiled=False, **settings), requests)
    for name, sample in expected.items():
        assert samples[name].tokens == sample.tokens
        assert samples[name].log_probs == pytest.approx(sample.log_probs, abs=1e-10)
    folded = [call for call in calls if call["window_size"] == (-1, -1)]
    assert bool(folded) == (kind == "llama" and not invariant)
    assert all(call["enable_gqa"] and "num_splits" not in call for call in folded)
    assert all(call["num_splits"] == 1 for call in calls if call["window_size"] != (-1, -1))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_kernel_that_refuses_num_splits_is_not_given_it(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """torch 2.12 has the argument in the signature, its kernel refuses it, and it never splits keys in pages."""
    packed = PackedModel(make_model(kind))
    settings: dict[str, Any] = {"eos_token_ids": (2,), "seed": 3, "kv_memory": 64 << 20}
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [Request(f"{i}", list(range(5, 5 + length)), params) for i, length in enumerate((50, 3))]
    expected = run(EmbeddedEngine(packed, **settings), requests)
    as_device(monkeypatch)
    refused = []

    def of_torch_2_12(*args: Any, num_splits: int | None = None, **kwargs: Any) -> torch.Tensor:
        if num_splits is not None:
            refused.append(num_splits)
            raise RuntimeError("num_splits requires FA3. Register FA3 with `register_flash_attention_fa3()`.")
        return varlen_attn(*args, **kwargs, num_splits=1, page=16)

    take(monkeypatch, of_torch_2_12)
    for _ in range(2):
        samples = run(EmbeddedEngine(packed, compiled=False, **settings), requests)
        assert {name: sample.tokens for name, sample in samples.items()} == {
            name: sample.tokens for name, sample in expected.items()
        }
    assert refused == [1], "asked once a process"


def test_what_else_a_kernel_raises_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    without_memory.__kwdefaults__ = {"num_splits": None}  # type: ignore[attr-defined]
    with pytest.raises(torch.OutOfMemoryError):
        flash.takes_splits(without_memory, torch.zeros(2, 256, 1, 8))


def test_on_a_device_its_log_probs_are_not_the_trainers(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedModel(make_model("llama"))
    settings: dict[str, Any] = {"eos_token_ids": (2,), "seed": 3, "kv_memory": 64 << 20}
    assert EmbeddedEngine(packed, **settings).exact
    as_device(monkeypatch)
    assert not EmbeddedEngine(packed, compiled=False, **settings).exact


def test_blocks_are_as_large_as_flash_attention_reads_them() -> None:
    assert kv_cache.block_tokens(torch.device("cuda:1")) == 256
    assert kv_cache.block_tokens(torch.device("cpu")) == kv_cache.BLOCK


class Reads(TorchDispatchMode):
    """Notes how many numbers are read through an index at most."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("length", [3, 300])
def test_without_flash_attention_no_more_blocks_are_read_than_are_used(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Whatever a block holds, by as many keys at a time."""
    monkeypatch.setattr(attention, "is_host", lambda device: False)
    read, outputs = {}, {}
    for size in (kv_cache.BLOCK, kv_cache._FLASH_BLOCK):
        torch.manual_seed(0)
        cache = KVCache(1024 // size, 1, 2, 8, torch.float64, torch.device("cpu"), compiled=False)
        cache.keys, cache.values = (x.unflatten(1, (-1, size)) for x in torch.randn(2, 1, 1024, 2, 8).double())
        plan = ScheduledBatch(size)
        plan.add([1], length - 1, range(1024 // size), 0)
        inputs = [torch.randn(1, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
        with Reads() as reads:
            tensors = attention.BatchTensors.of(plan, cache.device)
            outputs[size] = attention.PagedAttention(cache, tensors).attend(0, *inputs, 0.3, None)
        read[size] = reads.most
    assert read[kv_cache.BLOCK] == read[kv_cache._FLASH_BLOCK] == 256 * 2 * 8
    assert (outputs[kv_cache.BLOCK] - outputs[kv_cache._FLASH_BLOCK]).abs().max() < 1e-12


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was launched and read, in order."""
    events: list[str] = []
    make, read = HostCopy.__init__, HostCopy.read

    def noted(self: HostCopy, *columns: torch.Tensor) -> None:
        events.append("launch")
        make(self, *columns)

    def counted(self: HostCopy) -> list[list[float]]:
        events.append("read")
        numbers: list[list[float]] = unwatched(read)(self)
        return numbers

    monkeypatch.setattr(HostCopy, "__init__", noted)
    monkeypatch.setattr(HostCopy, "read", counted)
    return events


WAYS = [{"temperature": 0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.01}]


def test_a_decode_step_copies_to_the_host_once_and_waits_for_nothing_else(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, copies: list[str]
) -> None:
    """And it is launched before the tokens of the one before are read."""
    packed = PackedModel(make_model("llama"))
    as_device(monkeypatch)
    take(monkeypatch, unwatched(partial(varlen_attn, page=16)))
    engine = EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20, compiled=False)
    for i, way in enumerate(WAYS):
        engine.add(Request(str(i), [5, 6, 7 + i], SamplingParams(max_new_tokens=8, ignore_eos=True, **way)))
    engine.step()  # of the prompts
    copies.clear()
    with no_waits():
        for _ in range(5):
            engine.step()
    assert copies == ["launch", "read"] * 5


def test_single_rows_with_edits_wait_for_nothing_either(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, copies: list[str]
) -> None:
    """A grammar needs the token before, so the step before is read first; its mask goes to the device."""
    packed = PackedModel(make_model("llama"))
    as_device(monkeypatch)
    take(monkeypatch, unwatched(partial(varlen_attn, page=16)))
    monkeypatch.setattr(GrammarMask, "allowed", unwatched(GrammarMask.allowed))  # on the host alone
    engine = EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, tokenizer=tokenizer, kv_memory=64 << 20, compiled=False)
    ways = [*WAYS, {"min_new_tokens": 8}]
    for i, way in enumerate(ways):
        engine.add(Request(str(i), [5, 6, 7 + i], SamplingParams(max_new_tokens=8, **way)))
    engine.add(Request("numbers", [9], SamplingParams(max_new_tokens=8), grammar=Grammar.regex("[0-9]{8,}")))
    engine.step()
    copies.clear()
    with no_waits():
        for _ in range(5):
            engine.step()
    assert copies == ["read", "launch"] * 5
    samples = {sample.id: sample for sample in generate(engine, [])}
    assert tokenizer.decode(samples["numbers"].tokens).isdigit()
    assert len(samples["4"].tokens) == 8


@pytest.mark.parametrize("ways", [WAYS, [{"top_k": 3, "top_p": 0.9}], [{"min_new_tokens": 5}, {"stop": ("e", "ab")}]])
def test_every_way_of_sampling_gives_the_tokens_of_the_cpu(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, ways: list[Any]
) -> None:
    packed = PackedModel(make_model("llama"))
    settings: dict[str, Any] = {"eos_token_ids": (2,), "seed": 4, "tokenizer": tokenizer, "kv_memory": 64 << 20}
    requests = [
        Request(f"{i}/{j}", [5, 6, 7 + j], SamplingParams(max_new_tokens=12, **way))
        for i, way in enumerate(ways)
        for j in range(5)
    ]
    expected = run(EmbeddedEngine(packed, **settings), requests)
    as_device(monkeypatch)
    samples = run(EmbeddedEngine(packed, compiled=False, **settings), requests)
    for name, sample in expected.items():
        assert (samples[name].tokens, samples[name].finish) == (sample.tokens, sample.finish)
        assert samples[name].log_probs == pytest.approx(sample.log_probs, abs=1e-10)


def test_a_prompt_of_one_token_is_no_decode_step(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedModel(make_model("llama"))
    requests = [Request("a", [9], SamplingParams(max_new_tokens=4, ignore_eos=True))]
    expected = run(EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20), requests)
    as_device(monkeypatch)
    samples = run(EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20, compiled=False), requests)
    assert samples["a"].tokens == expected["a"].tokens


def test_what_cannot_be_recorded_is_launched_each_time(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedModel(make_model("llama"))
    requests = [Request(str(i), [5, 6 + i], SamplingParams(max_new_tokens=6)) for i in range(3)]
    expected = run(EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20), requests)
    as_device(monkeypatch)
    monkeypatch.setattr(device, "recorded", lambda function, device: None)
    samples = run(EmbeddedEngine(packed, eos_token_ids=(2,), seed=3, kv_memory=64 << 20, compiled=False), requests)
    assert {name: s.tokens for name, s in samples.items()} == {name: s.tokens for name, s in expected.items()}


def test_new_weights_in_the_same_memory_are_used_by_recorded_steps(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedModel(make_model("llama"))
    as_device(monkeypatch)
    made = []

    def recorded(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
        made.append(function)
        return recording.recorded(function, device)

    monkeypatch.setattr(device, "recorded", recorded)
    settings: dict[str, Any] = {"eos_token_ids": (2,), "seed": 3, "kv_memory": 64 << 20, "compiled": False}
    engine = EmbeddedEngine(packed, **settings)
    params = SamplingParams(max_new_tokens=6, temperature=0)

    def answer(engine: EmbeddedEngine) -> list[int]:
        return run(engine, [Request("a", [5, 6], params)])["a"].tokens

    first, count = answer(engine), len(made)
    with torch.no_grad():
        for weight in packed.model.parameters():
            weight.mul_(-0.7).add_(0.01)
    second = answer(engine)
    assert second != first and len(made) == count
    assert second == answer(EmbeddedEngine(packed, look_ahead=False, **settings))
    count = len(made)
    engine.sleep()
    engine.wake()  # the cache is elsewhere
    assert answer(engine) == second and len(made) == count + 1
