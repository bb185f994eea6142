from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.errors import ConfigError, ModelError, RolloutError
from verl.kernels import build, compiled
from verl.models.packed import PackedModel
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.embedded.attention import BatchTensors, PagedAttention
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.embedded.scheduler import ScheduledBatch
from verl.rollout.hf import HFEngine
from verl.rollout.options import SamplerOptions
from verl.weights.shard import Shard
from verl.weights.shards import model_shards
from verl.workers.actor import make_rollout_engine

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture
def engine(packed64: PackedModel, tokenizer: PreTrainedTokenizerFast) -> EmbeddedEngine:
    return EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, tokenizer=tokenizer, kv_memory=8 << 20)


def test_samples_of_a_prompt_share_one_prefill_and_prompts_their_beginning(engine: EmbeddedEngine) -> None:
    common = list(range(10, 74))
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for i in range(3):
        for j in range(8):
            engine.add(Request(f"{i}/{j}", [*common, 200 + i], params))
    engine.step()
    assert engine.scheduler.prompt_tokens == 65 + 1 + 1
    # Two shared blocks, one more block a prompt, one a response.
    assert engine.cache.num_blocks - engine.cache.available == 2 + 3 + 24
    list(generate(engine, []))
    assert engine.cache.available == engine.cache.num_blocks
    list(generate(engine, [Request("later", [*common, 1], params)]))
    assert engine.scheduler.prompt_tokens == 67 + 1


def test_a_finished_response_gives_its_place_at_once(packed64: PackedModel) -> None:
    engine = EmbeddedEngine(packed64, eos_token_ids=(), seed=0, max_batch=2, kv_memory=8 << 20)
    lengths = {"long": 20, "a": 5, "b": 5, "c": 5}
    requests = [Request(name, [5, 6], SamplingParams(max_new_tokens=n)) for name, n in lengths.items()]
    finished = [sample.id for sample in generate(engine, requests)]
    assert finished == ["a", "b", "c", "long"]
    assert engine.scheduler.steps <= 21


def test_stop_tokens_and_lengths(engine: EmbeddedEngine) -> None:
    free = next(generate(engine, [Request("x", [7, 8, 9], SamplingParams(max_new_tokens=30, ignore_eos=True))]))
    stop = free.tokens[11]
    first = free.tokens.index(stop)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop, 10**9))
    stopped = next(generate(engine, [Request("x", [7, 8, 9], params)]))
    assert (stopped.tokens, stopped.finish) == (free.tokens[: first + 1], "stop")
    params = SamplingParams(max_new_tokens=30, min_new_tokens=25, ignore_eos=True, stop_token_ids=(stop,))
    kept = next(generate(engine, [Request("x", [7, 8, 9], params)]))
    assert len(kept.tokens) >= 25
    assert stop not in kept.tokens[:25]
    nothing = next(generate(engine, [Request("x", [7, 8, 9], SamplingParams(max_new_tokens=0))]))
    assert (nothing.tokens, nothing.log_probs, nothing.finish) == ([], [], "length")


def test_prompt_and_response_end_at_max_length(packed64: PackedModel) -> None:
    engine = EmbeddedEngine(packed64, eos_token_ids=(), seed=0, max_length=20, kv_memory=8 << 20)
    sample = next(generate(engine, [Request("x", [5] * 13, SamplingParams(max_new_tokens=100))]))
    assert (len(sample.tokens), sample.finish) == (7, "length")
    with pytest.raises(RolloutError, match="20"):
        engine.add(Request("y", [5] * 20))


def test_stop_strings_end_a_response_across_tokens(engine: EmbeddedEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    request = Request("x", [7, 8, 9], SamplingParams(max_new_tokens=60, ignore_eos=True))
    free = next(generate(engine, [request]))
    text = tokenizer.decode(free.tokens)
    stop = next(text[i : i + 3] for i in range(15, 60) if "\ufffd" not in text[i : i + 3])
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, stop=("never there", stop))
    sample = next(generate(engine, [Request("x", [7, 8, 9], params)]))
    assert sample.finish == "stop"
    assert sample.text == text[: text.index(stop)]
    assert sample.tokens == free.tokens[: len(sample.tokens)]
    assert stop in tokenizer.decode(sample.tokens)
    assert stop not in tokenizer.decode(sample.tokens[:-1])
    # One that ends before the least length ends nothing, then or later.
    params = SamplingParams(max_new_tokens=60, min_new_tokens=len(sample.tokens) + 1, ignore_eos=True, stop=(stop,))
    sample = next(generate(engine, [Request("x", [7, 8, 9], params)]))
    again = text.find(stop, text.index(stop) + 1)
    assert sample.text == (text if again < 0 else text[:again])
    params = SamplingParams(**{**asdict(params), "min_new_tokens": params.min_new_tokens - 1})
    sample = next(generate(engine, [Request("x", [7, 8, 9], params)]))
    assert (len(sample.tokens), sample.text) == (params.min_new_tokens, text[: text.index(stop)])


def test_stop_strings_need_a_tokenizer(packed64: PackedModel) -> None:
    engine = EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, kv_memory=8 << 20)
    with pytest.raises(RolloutError, match="tokenizer"):
        engine.add(Request("x", [5], SamplingParams(stop=("a",))))
    assert engine.unfinished == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([5, 300], "300"), ([-1], "-1"), ([5] * 512, "512")],
    ids=["empty", "unknown", "negative", "too long"],
)
def test_requests_that_cannot_be_answered_are_refused(engine: EmbeddedEngine, prompt: list[int], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        engine.add(Request("x", prompt))
    assert engine.unfinished == 0


def test_ids_in_use_and_requests_larger_than_the_cache_are_refused(packed64: PackedModel) -> None:
    engine = EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, kv_memory=300_000)
    engine.add(Request("x", [5], SamplingParams(max_new_tokens=8)))
    with pytest.raises(RolloutError, match="'x' is already"):
        engine.add(Request("x", [6]))
    with pytest.raises(RolloutError, match="KV cache"):
        engine.add(Request("y", [5] * 200, SamplingParams(max_new_tokens=300)))
    with pytest.raises(ConfigError, match="too small"):
        EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, kv_memory=1000)
    with pytest.raises(ConfigError, match="max_batch"):
        EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, max_batch=0)


def test_models_without_a_packed_forward_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(ModelError, match="hf"):
        EmbeddedEngine(PackedModel(make_model("bloom")), eos_token_ids=(2,), seed=0)


def test_several_attentions_a_layer_are_for_the_hf_engine(make_model: MakeModel) -> None:
    packed = PackedModel(make_model("diffllama"))  # the second call of a layer would overwrite the first one's keys
    assert packed.supports_packed
    with pytest.raises(ModelError, match="once a layer"):
        EmbeddedEngine(packed, eos_token_ids=(2,), seed=0)
    assert isinstance(make_rollout_engine(packed, None, (2,), SamplerOptions(name="embedded")), HFEngine)


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_keys_of_another_shape_than_the_cache_are_not_written(compiled: bool) -> None:
    cache = KVCache(2, 1, 2, 8, torch.float32, torch.device("cpu"), compiled)
    plan = ScheduledBatch()
    plan.add([5, 6], 0, [0], 1)
    attention, heads = PagedAttention(cache, BatchTensors.of(plan, cache.device)), torch.ones(2, 4, 8)
    attention.attend(0, heads, heads[:, :2], heads[:, :2], 1.0, None)
    wide = torch.ones(2, 4, 32)
    for query, key in ((wide, wide[:, :2]), (heads, heads), (heads[:, :3], heads[:, :2])):
        with pytest.raises(ModelError, match="2 heads of size 8"):
            attention.attend(0, query, key, key, 1.0, None)


@pytest.mark.parametrize("hf", [False, True], ids=["embedded", "hf"])
def test_abort_returns_what_there_is(packed64: PackedModel, hf: bool) -> None:
    if hf:
        engine: EmbeddedEngine | HFEngine = HFEngine(packed64.model, eos_token_ids=(), seed=0, max_batch=2)
    else:
        engine = EmbeddedEngine(packed64, eos_token_ids=(), seed=0, max_batch=2, kv_memory=8 << 20)
    for name in ("a", "b", "waiting"):
        engine.add(Request(name, [5, 6], SamplingParams(max_new_tokens=9)))
    for _ in range(3):
        assert engine.step() == []
    engine.abort(["a", "waiting", "unknown"])
    engine.abort(["a"])
    aborted = {sample.id: sample for sample in engine.step()}
    assert {name: (len(s.tokens), s.finish) for name, s in aborted.items()} == {
        "a": (3, "abort"),
        "waiting": (0, "abort"),
    }
    rest = list(generate(engine, []))
    assert [(s.id, len(s.tokens), s.finish) for s in rest] == [("b", 9, "length")]


@pytest.mark.parametrize("hf", [False, True], ids=["embedded", "hf"])
def test_new_weights_serve_from_the_next_token_on(make_model: MakeModel, hf: bool) -> None:
    old, new = make_model("llama"), make_model("llama", seed=1)

    def engine(model: PreTrainedModel) -> EmbeddedEngine | HFEngine:
        if hf:
            return HFEngine(model, eos_token_ids=(), seed=0)
        return EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)

    params = SamplingParams(max_new_tokens=40)
    served = engine(old)
    served.add(Request("x", [5, 6, 7], params))
    for _ in range(10):
        served.step()
    # A tied weight may come under its other name too.
    shards = [Shard.whole(s.name, s.tensor.clone()) for s in model_shards(new)]
    embedding = next(s.tensor for s in shards if "embed" in s.name)
    served.load_shards([*shards, Shard.whole("lm_head.weight", embedding)], version=7)
    sample = next(generate(served, []))
    assert served.policy_version == 7
    assert sample.policy_version == 0

    with torch.no_grad():
        logits = new(torch.tensor([[5, 6, 7, *sample.tokens]])).logits[0, 12:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[10:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.log_probs[10:], dtype=torch.float64), expected, atol=1e-6, rtol=0)
    again = next(generate(served, [Request("z", [5, 6, 7], params)]))
    fresh = next(generate(engine(new), [Request("z", [5, 6, 7], params)]))
    assert (again.tokens, again.policy_version) == (fresh.tokens, 7)


def test_weights_trained_in_place_are_only_noted(make_model: MakeModel) -> None:
    model = make_model("llama")
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)
    request = Request("x", list(range(10, 80)), SamplingParams(max_new_tokens=12))
    before = next(generate(engine, [request]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    versions = [parameter._version for parameter in model.parameters()]
    unannounced = next(generate(engine, [request]))
    engine.load_shards(model_shards(model), 1)
    assert [parameter._version for parameter in model.parameters()] == versions
    after = next(generate(engine, [request]))
    # The prompt cached under the old weights must not be used.
    fresh = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)
    assert after.tokens == next(generate(fresh, [request])).tokens
    assert after.log_probs == unannounced.log_probs != before.log_probs
    assert (unannounced.policy_version, after.policy_version) == (0, 1)


def test_sleep_gives_the_cache_back_and_keeps_the_requests(engine: EmbeddedEngine) -> None:
    request = Request("x", list(range(10, 50)), SamplingParams(max_new_tokens=20))
    expected = next(generate(engine, [request]))
    engine.add(request)
    for _ in range(5):
        engine.step()
    engine.sleep()
    assert engine.cache.values.numel() == 0
    with pytest.raises(RolloutError, match="wake"):
        engine.step()
    engine.abort(["x"])
    assert [sample.finish for sample in engine.step()] == ["abort"]
    engine.wake()
    engine.wake()
    assert next(generate(engine, [request])).tokens == expected.tokens


def test_broken_weights_are_named_and_leave_no_trace(make_model: MakeModel) -> None:
    model = make_model("llama")
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)
    request = Request("x", list(range(10, 80)), SamplingParams(max_new_tokens=5))
    good = model.model.norm.weight.detach().clone()
    model.model.norm.weight.data.fill_(torch.nan)
    engine.add(request)
    with pytest.raises(RolloutError, match="'x' at token 0 are not finite"):
        engine.step()
    assert engine.cache.available == engine.cache.num_blocks
    model.model.norm.weight.data.copy_(good)
    sample = next(generate(engine, []))
    fresh = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)
    assert sample.tokens == next(generate(fresh, [request])).tokens


def test_the_model_is_left_in_training_mode_and_without_gradients(make_model: MakeModel) -> None:
    model = make_model("llama").train()
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)
    list(generate(engine, [Request("x", [5, 6], SamplingParams(max_new_tokens=3))]))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_changes_between_rollouts_is_looked_at_again(make_model: MakeModel) -> None:
    model = make_model("llama", torch.float32)
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20)
    request = Request("x", list(range(10, 50)), SamplingParams(max_new_tokens=8))
    before = next(generate(engine, [request]))

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model.model.layers[0].mlp.down_proj.__class__ = Doubled
    engine.load_shards(model_shards(model), 1)
    doubled = next(generate(engine, [request]))
    fresh = EmbeddedEngine(PackedModel(model), eos_token_ids=(), seed=0, kv_memory=8 << 20, compiled=False)
    assert doubled.log_probs == pytest.approx(next(generate(fresh, [request])).log_probs, abs=1e-4)
    assert doubled.log_probs != pytest.approx(before.log_probs, abs=1e-3)
    model.to(torch.bfloat16)
    with pytest.raises(RolloutError, match="bfloat16"):
        engine.add(request)


def test_without_a_compiler_generation_goes_on_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, packed64: PackedModel
) -> None:
    request = Request("x", list(range(10, 50)), SamplingParams(max_new_tokens=10))
    expected = next(generate(EmbeddedEngine(packed64, eos_token_ids=(), seed=0, kv_memory=8 << 20), [request]))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    for cached in (compiled.kernels, build.library):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            engine = EmbeddedEngine(packed64, eos_token_ids=(), seed=0, kv_memory=8 << 20)
            sample = next(generate(engine, [request]))
    finally:
        for cached in (compiled.kernels, build.library):
            cached.cache_clear()
    assert "compiler" in caplog.text
    assert sample.tokens == expected.tokens


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
def test_two_unfinished_requests_have_different_ids(packed64: PackedModel, kind: type) -> None:
    engine = kind(packed64 if kind is EmbeddedEngine else packed64.model, eos_token_ids=(2,), seed=0)
    engine.add(Request("a", [5], SamplingParams(max_new_tokens=1)))
    with pytest.raises(RolloutError, match="ids must differ"):
        engine.add(Request("a", [7]))
    assert [sample.id for sample in generate(engine, [])] == ["a"]
    engine.add(Request("a", [7], SamplingParams(max_new_tokens=1)))
