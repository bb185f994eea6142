"""Weights in 4 bits: their error, their memory, and adapters over them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

import verl
from tests.training.cases import OPTIM, ROWS, log_probs, make_engine, ragged_batch, tiny_model, update
from verl.errors import ConfigError, ModelError
from verl.models.int4 import Int4Linear, to_int4, weight_bytes
from verl.models.loading import load_model
from verl.models.lora import add_lora, merged_shards
from verl.models.memory import ModelSize
from verl.models.options import LoraOptions
from verl.models.portable import PortableModel
from verl.planner.memory import ddp, estimate
from verl.rewards.model import RewardModel
from verl.weights.layout import Layout
from verl.weights.shard import checksum
from verl.weights.shards import load_model_shards, model_shards


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 128), (5, 96), (128, 32)])
def test_numbers_are_at_most_half_a_step_off(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], dtype=dtype)
    layer.weight.data[0, :64] = 0.25  # a group of equal numbers
    kept = Int4Linear.of(layer)
    groups = layer.weight.detach().double().unflatten(1, (kept.step.shape[1], -1))
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    off = (kept.weight.double().view_as(groups) - groups).abs()
    assert bool((off <= (0.5 if dtype != torch.bfloat16 else 0.6) * step + 1e-6 + 0.004 * groups.abs()).all())
    assert kept.weight.dtype == dtype and kept.codes.numel() * 2 == layer.weight.numel()


def test_a_product_and_its_gradient_are_those_of_the_restored_weight() -> None:
    torch.manual_seed(0)
    kept = Int4Linear.of(nn.Linear(64, 6, dtype=torch.float64))
    inputs = [torch.randn(3, 64, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    dense = kept.dense()
    for layer, x in zip((kept, dense), inputs, strict=True):
        layer(x).square().sum().backward()
    assert torch.equal(kept(inputs[0]), dense(inputs[1]))
    assert inputs[0].grad is not None and torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


def wide_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Most of its weights are in its layers, as in a real one."""
    config = LlamaConfig(
        vocab_size=37, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, eos_token_id=2
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.2), (torch.bfloat16, 0.32)])
def test_memory_falls_and_the_error_is_reported(
    dtype: torch.dtype, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = wide_model(dtype), wide_model(dtype)
    with caplog.at_level(logging.INFO, logger="verl"):
        error = to_int4(model)
    mean, most = float(error.mean()), float(error.max())
    assert weight_bytes(model) < share * weight_bytes(plain)
    assert 0 < mean < most < 1
    batch = ragged_batch(ROWS)
    gap = (log_probs(make_engine(model), batch) - log_probs(make_engine(plain), batch)).abs()
    assert 0 < float(gap.mean()) < 3 * most
    (line,) = [record.message for record in caplog.records if "int4" in record.message]
    assert f"{mean:.3g} on average, {most:.3g} at most" in line
    assert f"{weight_bytes(model) / 1e6:.1f} MB, before {weight_bytes(plain) / 1e6:.1f}" in line
    assert not any(weight.requires_grad for weight in model.parameters())


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="no linear layers"):
        to_int4(tiny_model("gpt2"))


def test_adapters_over_weights_in_int4_learn_and_merge() -> None:
    model = wide_model(torch.float64)
    to_int4(model)
    base = checksum(shard for shard in model_shards(model))
    add_lora(model, LoraOptions(r=4))
    engine, batch = make_engine(model, optim=OPTIM), ragged_batch(ROWS)
    before = log_probs(engine, batch)
    losses = [update(engine, batch)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.01
    assert torch.equal(engine.predict(batch, ("log_probs",), adapters=False)["log_probs"], before)
    own = {name.replace(".base_layer", ""): t for name, t in model.state_dict().items() if ".lora_" not in name}
    plain = wide_model(torch.float64)
    to_int4(plain)
    plain.load_state_dict(own)
    assert checksum(model_shards(plain)) == base  # the base has not moved
    dense = wide_model(torch.float64)
    load_model_shards(dense, merged_shards(model))
    assert float((log_probs(make_engine(dense), batch) - log_probs(engine, batch)).abs().max()) < 1e-8
    travelled = PortableModel.of_parts(PortableModel(model).parts()).model
    assert checksum(model_shards(travelled)) == checksum(model_shards(model))
    assert torch.equal(log_probs(make_engine(travelled), batch), log_probs(engine, batch))


def test_the_memory_that_a_lora_needs_is_estimated() -> None:
    plain, adapted, small = (wide_model(torch.bfloat16) for _ in range(3))
    to_int4(small)
    for model in (adapted, small):
        add_lora(model, LoraOptions(r=4))
    models = (plain, adapted, small)
    full, lora, qlora = (estimate(ModelSize.from_model(model), ddp(2), Layout()) for model in models)
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    for found, model in ((lora, adapted), (qlora, small)):
        assert found.kept["weights"] == weight_bytes(model) - sum(
            b.nbytes for n, b in model.named_buffers() if "inv_freq" in n
        )
        assert (found.kept["optimizer"], found.kept["gradients"]) == (6 * trained, 4 * trained)
    assert qlora.resting < 0.6 * lora.resting < 0.2 * full.resting


@pytest.mark.slow
def test_gradient_checkpointing_goes_with_int4() -> None:
    batch, found = ragged_batch(ROWS), []
    for checkpointing in (False, True):
        model = wide_model(torch.float64)
        to_int4(model)
        add_lora(model, LoraOptions(r=4))
        engine = make_engine(model, optim=OPTIM, gradient_checkpointing=checkpointing)
        found.append([update(engine, batch)["grad_norm"] for _ in range(2)])
    assert found[0] == pytest.approx(found[1], abs=1e-12)


def test_a_reward_model_in_int4(tmp_path: Path, tiny: Path) -> None:
    model = load_model(tiny)
    config = type(model.config).from_dict({**model.config.to_dict(), "num_labels": 1})
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    rewards = [RewardModel(str(tmp_path), tokenizer=str(tiny), dtype=dtype) for dtype in ("float32", "int4")]
    full, small = (reward.function(["a", "bc", "hello there"], ["Hi", "Hi", "x"]) for reward in rewards)
    assert full != small and full == pytest.approx(small, abs=0.1)
    assert weight_bytes(rewards[1].function.model) < weight_bytes(rewards[0].function.model) / 2


def test_a_reference_in_int4(tiny: Path) -> None:
    actors = [verl.Actor(str(tiny), dtype="float32") for _ in range(3)]
    sequences = actors[0].generate_sequences(["Once upon"], n=2, max_new_tokens=6, ignore_eos=True)
    actors[1].make_reference(dtype="int4")
    actors[2].make_reference(str(tiny), dtype="int4")
    full, copied, loaded = (actor.compute_ref_log_probs(sequences).tensor("ref_log_probs") for actor in actors)
    assert torch.equal(copied, loaded) and 0 < float((full - copied).abs().max()) < 0.1
    assert any(isinstance(module, Int4Linear) for module in actors[1].reference.model.modules())
    assert all(weight.requires_grad for weight in actors[1].model.parameters())
    with pytest.raises(ConfigError, match="by name"):
        verl.Actor(str(tiny)).make_reference(dtype="bfloat16")


@pytest.mark.slow
def test_qlora_by_setting(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), dtype="int4", lora={"r": 4}, optim={"lr": 1e-2}, sampling={"max_new_tokens": 6})
    for number in range(3):
        sequences = actor.generate_sequences(["Once upon"], n=4, key=str(number), ignore_eos=True)
        own = actor.compute_log_probs(sequences).tensor("log_probs")
        assert float((own - sequences.tensor("rollout_log_probs")).abs().max()) < 1e-4
        actor.update(sequences, [float(sum(tokens) % 7) for tokens in sequences["response_tokens"]])
    reference = actor.compute_ref_log_probs(sequences).tensor("ref_log_probs")
    assert float((actor.compute_log_probs(sequences).tensor("log_probs") - reference).abs().max()) > 1e-3
    with pytest.raises(ConfigError, match=r"dtype: weights in int4 are not trained: set lora"):
        verl.Actor(str(tiny), dtype="int4")
