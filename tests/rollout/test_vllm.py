"""vLLM itself, in this process, on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import verl
import verl.actor
import verl.worker
from verl.errors import ConfigError, RolloutError
from verl.models.lora import adapters_off, add_lora, merged_shards
from verl.models.memory import ModelSize
from verl.models.options import LoraOptions
from verl.rollout.base import Request, Sample, SamplingParams, generate
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.transport import Transport, in_device_memory, in_file
from verl.weights.shard import Shard
from verl.weights.shards import model_shards

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 30, 7, 8], [40, 41, 42], [100] * 70]


def started(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **options: Any) -> VLLMEngine:
    options = {"max_num_seqs": 16, "kv_memory": 1 << 23, **options}
    engine = VLLMEngine(model, tokenizer, eos_token_ids=(2,), seed=0, **options)
    engine.load_shards(merged_shards(model), 0)
    return engine


# Before the engine of `fp32`, whose process group lets those beside it run in processes of their own.
@pytest.mark.parametrize(
    ("fault", "message"),
    [("skipped", "versions"), ("head", "output layer"), ("missing", "did not come"), ("dies", "no memory")],
)
def test_wrong_weights_are_detected_and_never_served(
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    message: str,
) -> None:
    from verl.rollout.vllm.worker import ShardTransfer

    model = make_model("llama", torch.bfloat16)
    engine = started(model, tokenizer)
    inner: Any = engine.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine.model
    receive = ShardTransfer.receive_weights
    if fault == "skipped":
        monkeypatch.setattr(ShardTransfer, "finish_weight_update", lambda self: None)
    elif fault == "missing":
        engine._tied = {}  # the output layer's alias is forgotten
    elif fault == "head":  # a copy that it computes with, as some processors have a packed one, is not made anew
        old = inner.lm_head.weight.detach().clone()
        method = inner.lm_head.quant_method
        monkeypatch.setattr(method, "apply", lambda layer, x, bias=None: torch.nn.functional.linear(x, old, bias))
    else:

        def broken(self: Any, *args: Any) -> Any:
            receive(self, *args)
            raise MemoryError("no memory is left")

        monkeypatch.setattr(ShardTransfer, "receive_weights", broken)
    nudge(model, 1e-4)
    try:
        with pytest.raises(RolloutError, match=message):
            engine.load_shards(model_shards(model), 1)
        for use in (engine.step, lambda: engine.add(Request("x", [5])), lambda: engine.load_shards([], 2)):
            with pytest.raises(RolloutError, match="not used again"):
                use()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def fp32(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[VLLMEngine, PreTrainedModel]]:
    """An engine over a model with tied weights; a test leaves the two in step."""
    model = make_model("llama", torch.float32)
    engine = started(model, tokenizer)
    yield engine, model
    engine.close()


def test_adapters_arrive_merged_into_the_weights(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_model("llama", torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    add_lora(model, LoraOptions(r=4))
    engine = started(model, tokenizer)
    try:
        for version in (1, 2):
            with torch.no_grad():
                for weight in (weight for weight in model.parameters() if weight.requires_grad):
                    weight += 0.05 * torch.randn_like(weight)
            engine.load_shards(merged_shards(model), version)
            samples = list(generate(engine, requests(f"a{version}", SamplingParams(max_new_tokens=20))))
            assert differences(model, samples).max() < 1e-4
            with adapters_off(model):
                assert differences(model, samples).max() > 0.01
        state = {name.replace(".base_layer", ""): weight for name, weight in model.state_dict().items()}
        assert all(torch.equal(state[name], weight) for name, weight in before.items())
    finally:
        engine.close()


def requests(tag: str, params: SamplingParams, n: int = 2) -> list[Request]:
    return [Request(f"{tag}.{row}/{i}", prompt, params) for row, prompt in enumerate(PROMPTS) for i in range(n)]


def prompt_of(sample: Sample) -> list[int]:
    return PROMPTS[int(sample.id.split(".")[1].split("/")[0])]


@torch.no_grad()
def plain(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def differences(model: PreTrainedModel, samples: list[Sample], temperature: float = 1.0) -> torch.Tensor:
    expected = [plain(model, prompt_of(s), s.tokens, temperature) for s in samples if s.tokens]
    return (torch.cat(expected) - torch.tensor([x for s in samples for x in s.log_probs])).abs()


def nudge(model: PreTrainedModel, size: float = 0.02) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn_like(parameter)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, temperature=0.0),
        SamplingParams(max_new_tokens=20, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
        SamplingParams(max_new_tokens=20, temperature=1.5, min_new_tokens=18),
    ],
)
def test_log_probs_are_the_models_at_that_temperature_before_truncation(
    fp32: tuple[VLLMEngine, PreTrainedModel], params: SamplingParams
) -> None:
    engine, model = fp32
    samples = list(generate(engine, requests("p", params, n=3)))
    assert len(samples) == 9
    assert max(len(s.tokens) for s in samples) == 20
    assert all(len(s.log_probs) == len(s.tokens) >= params.min_new_tokens for s in samples)
    assert all((s.finish == "stop") == (s.tokens[-1] == 2) for s in samples)
    assert differences(model, samples, params.temperature).max() < 1e-4
    if params.temperature == 0:
        assert len({tuple(s.tokens) for s in samples if s.id.startswith("p.0")}) == 1


def test_a_sample_follows_from_its_id(fp32: tuple[VLLMEngine, PreTrainedModel]) -> None:
    engine, _ = fp32
    params = SamplingParams(max_new_tokens=20)
    together = {s.id: s.tokens for s in generate(engine, requests("i", params))}
    (alone,) = generate(engine, requests("i", params)[3:4])
    assert alone.tokens == together[alone.id]
    assert len({tuple(tokens) for tokens in together.values()}) == len(together)


def test_stops(fp32: tuple[VLLMEngine, PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> None:
    engine, _ = fp32
    (free,) = generate(engine, [Request("s.0/0", PROMPTS[0], SamplingParams(max_new_tokens=30, ignore_eos=True))])
    letters = [token for token in free.tokens if 33 <= token < 90]  # one-byte characters of the byte tokenizer
    stop = tokenizer.decode([letters[1]])
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(stop,))
    (cut,) = generate(engine, [Request("s.0/0", PROMPTS[0], params)])
    assert cut.finish == "stop"
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    assert stop in tokenizer.decode(cut.tokens)
    assert cut.text is not None and stop not in cut.text
    ends = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(free.tokens[4],))
    (ended,) = generate(engine, [Request("s.0/0", PROMPTS[0], ends)])
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_requests_that_cannot_be_answered(fp32: tuple[VLLMEngine, PreTrainedModel]) -> None:
    engine, _ = fp32
    for prompt, word in (([], "empty"), ([300], "vocabulary"), ([5] * 600, "prompt and response")):
        with pytest.raises(RolloutError, match=word):
            engine.add(Request("x", prompt))
    engine.add(Request("x", [5], SamplingParams(max_new_tokens=0)))
    with pytest.raises(RolloutError, match="ids must differ"):
        engine.add(Request("x", [5]))
    assert [(s.tokens, s.finish) for s in engine.step()] == [([], "length")]
    long = [7] * (engine.max_length - 3)
    (sample,) = generate(engine, [Request("y", long, SamplingParams(max_new_tokens=50, ignore_eos=True))])
    assert (len(sample.tokens), sample.finish) == (3, "length")
    assert engine.unfinished == 0


def test_abort_hands_out_what_is_there(fp32: tuple[VLLMEngine, PreTrainedModel]) -> None:
    engine, model = fp32
    for request in requests("a", SamplingParams(max_new_tokens=40, ignore_eos=True), n=1):
        engine.add(request)
    for _ in range(6):
        assert engine.step() == []
    engine.abort(["a.1/0", "nobody"])
    (aborted,) = engine.step()
    assert (aborted.id, aborted.finish) == ("a.1/0", "abort")
    assert 0 < len(aborted.tokens) <= 6
    rest = list(generate(engine, []))
    assert {s.id for s in rest} == {"a.0/0", "a.2/0"}
    assert differences(model, [aborted, *rest]).max() < 1e-4


def test_new_weights_are_served_also_to_what_is_in_work(fp32: tuple[VLLMEngine, PreTrainedModel]) -> None:
    engine, model = fp32
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for version in (1, 2):
        nudge(model)
        assert differences(model, list(generate(engine, requests("w", params)))).max() > 1e-2
        engine.load_shards(model_shards(model), version)
        samples = list(generate(engine, requests("w", params)))
        assert differences(model, samples).max() < 1e-3
        assert {s.policy_version for s in samples} == {version}
        score = engine.score(PROMPTS[2], [5, 6, 7])
        assert (torch.tensor(score) - plain(model, PROMPTS[2], [5, 6, 7])).abs().max() < 1e-3
    engine.add(Request("half", PROMPTS[2], params))
    for _ in range(8):
        engine.step()
    nudge(model)
    engine.load_shards(model_shards(model), 3)
    (half,) = generate(engine, [])
    assert half.policy_version == 2
    exact = (plain(model, PROMPTS[2], half.tokens) - torch.tensor(half.log_probs)).abs()
    assert exact[8:].max() < 1e-3, "the cache of the old weights is still in use"
    assert exact[:6].max() > 1e-3
    engine.sleep()
    engine.wake()
    assert differences(model, list(generate(engine, requests("z", params)))).max() < 1e-3


def test_what_fails_before_weights_are_put_in_place_leaves_the_old_ones(
    fp32: tuple[VLLMEngine, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = fp32

    def stream() -> Iterator[Shard]:
        yield from list(model_shards(model))[:3]
        raise OSError("the trainer's disk is gone")

    version = engine.policy_version
    with pytest.raises(OSError, match="disk"):
        engine.load_shards(stream(), 9)
    monkeypatch.setattr("verl.rollout.vllm.transport.load_file", None)
    monkeypatch.setattr(engine, "_publish", in_file)
    with pytest.raises(RolloutError, match=r"did not take the weights of version 9"):
        engine.load_shards(model_shards(model), 9)
    monkeypatch.undo()
    samples = list(generate(engine, requests("o", SamplingParams(max_new_tokens=20))))
    assert {s.policy_version for s in samples} == {version}
    assert differences(model, samples).max() < 1e-3
    engine.load_shards(model_shards(model), 9)


@contextmanager
def damaged(shards: Sequence[Shard]) -> Iterator[dict[str, Any]]:
    with in_file(shards) as message:
        yield {**message, "checksum": "0"}


def test_untied_weights_travel_by_file_too_and_damage_is_seen(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen2", torch.float32)
    token = ModelSize.from_model(model).kv_bytes_per_token()
    engine = started(model, tokenizer, kv_memory=12 * 32 * token + 9 * token)
    assert engine.max_length == 11 * 32  # in whole blocks, one of which vLLM keeps
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    (longest,) = generate(engine, [Request("long", [7] * 340, params)])
    assert len(longest.tokens) == 12
    with pytest.raises(ConfigError, match="holds no block"):
        VLLMEngine(model, tokenizer, eos_token_ids=(2,), seed=0, kv_memory=40 * token)
    nudge(model)
    monkeypatch.setattr(engine, "_publish", in_file)
    engine.load_shards(model_shards(model), 1)
    samples = list(generate(engine, requests("f", SamplingParams(max_new_tokens=20))))
    assert differences(model, samples).max() < 1e-3
    monkeypatch.setattr(engine, "_publish", damaged)
    with pytest.raises(RolloutError, match="not those that were sent"):
        engine.load_shards(model_shards(model), 2)
    assert {s.policy_version for s in generate(engine, requests("f", SamplingParams(max_new_tokens=20)))} == {1}
    engine.close()


def test_bf16_is_as_near_after_updates_as_a_fresh_engine(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_model("llama", torch.bfloat16)
    engine = started(model, tokenizer)
    for version in range(1, 6):
        nudge(model, 5e-3)
        engine.load_shards(model_shards(model), version)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    after = differences(model, list(generate(engine, requests("b", params, n=5)))).mean()
    engine.close()
    fresh_engine = started(model, tokenizer)
    fresh = differences(model, list(generate(fresh_engine, requests("b", params, n=5)))).mean()
    fresh_engine.close()
    print(f"bf16 mean |difference|: after five updates {after:.4f}, fresh {fresh:.4f}")
    assert after < 0.05
    assert after < 1.2 * fresh


@pytest.mark.parametrize(
    "transport", [in_file, partial(in_device_memory, device="cpu", ranks=2)], ids=["file", "device"]
)
def test_two_ranks_share_the_model(
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights come in a file, or, in many bunches, in memory that the workers open, as that of a GPU would be."""
    monkeypatch.setattr("verl.weights.shard.BUNCH", 1 << 14)
    model = make_model("llama", torch.float32)
    engine = started(model, tokenizer, tensor_parallel_size=2)
    try:
        assert engine._publish is in_file
        engine._publish = transport
        nudge(model)
        engine.load_shards(model_shards(model), 1)
        samples = list(generate(engine, requests("t", SamplingParams(max_new_tokens=12, temperature=0.8))))
        assert differences(model, samples, 0.8).max() < 1e-3
        nudge(model)
        engine.load_shards(model_shards(model), 2)  # now in place
        samples = list(generate(engine, requests("u", SamplingParams(max_new_tokens=12))))
        assert differences(model, samples).max() < 1e-3
    finally:
        engine.close()
        for memory in Path("/dev/shm").glob("vllm_dist_*"):  # of its ranks: vLLM's CPU build never removes it
            memory.unlink()


def test_the_process_stays_as_it_was(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_model("llama", torch.float32)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    engine = started(model, tokenizer)
    engine.close()
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    with pytest.raises(ConfigError, match="float64"):
        VLLMEngine(make_model("llama"), tokenizer, eos_token_ids=(2,), seed=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda path, **options: verl.actor.VLLMActor(
            model_name=path, tensor_parallel_size=1, max_num_seqs=16, **options
        ),
        lambda path, **options: verl.worker.ActorRolloutRefWorker(
            model_path=path, tensor_parallel_size=1, max_batch_size=16, rollout_backend="vllm", **options
        ),
    ],
    ids=["VLLMActor", "ActorRolloutRefWorker"],
)
def test_an_actor_trains_on_what_vllm_samples(make_tiny: Callable[..., Any], make: Callable[..., verl.Actor]) -> None:
    """The engine follows the trainer; the mismatch is reported in each step and stays what rounding makes it."""
    actor = make(str(make_tiny("wide")), optim={"lr": 1e-2}, kv_cache_gb=0.01)
    trainer = verl.Trainer(
        actor, reward_fn=lambda texts: [float(len(set(text))) for text in texts], n=4,
        sampling=verl.SamplingParams(max_new_tokens=12, temperature=0.9), log_dir=False,
    )  # fmt: skip
    for step in range(3):
        metrics = trainer.step(["Once upon a time", "In the beginning"])
        assert metrics["sync/mismatch/max"] < 1e-3, step
        assert abs(metrics["mismatch/log_ratio/max"]) < 1e-3, step
        assert metrics["grad_norm/actor"] > 0
    assert actor.policy_version == 3
    engine = actor.group.worker.rollout_engine
    assert isinstance(engine, VLLMEngine)
    engine.close()
