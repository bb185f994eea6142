"""Memory: what there is, what a model needs, and errors before it is too late."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from verl.attention.segments import pack_rows
from verl.config import build_config
from verl.errors import ConfigError
from verl.models.memory import CPU, HeadSizes, ModelSize
from verl.models.packed import PackedModel
from verl.planner.memory import ddp, estimate
from verl.run.memory import actor_memory
from verl.weights.layout import Layout


def test_import_without_torch() -> None:
    code = "import sys, verl.models.memory; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("heads", [6, 3], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_the_backward_keeps(dtype: torch.dtype, heads: int) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    packed = PackedModel(model)
    assert ModelSize.from_model(model).fused == (heads == 3) == (packed.fused is not None)
    flat = pack_rows([[5] * 100] * 4, [[7] * 101] * 4)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed.hidden(flat.tokens, flat.positions, flat.context)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    size = ModelSize.from_model(model)
    reckoned = estimate(size, ddp(size.itemsize), Layout(), len(flat.tokens)).step["activations"]
    assert reckoned == pytest.approx(measured, rel=0.1)


def test_parts_of_the_estimate(llama: PreTrainedModel) -> None:
    size = ModelSize.from_model(llama.bfloat16())
    count = sum(parameter.numel() for parameter in llama.parameters())
    usage = estimate(size, ddp(2), Layout(), 100)
    assert usage.kept == {"weights": 2 * count, "gradients": 4 * count, "optimizer": 6 * count}
    assert estimate(size, ddp(2, fp32_moments=True), Layout()).kept["optimizer"] == 10 * count
    assert estimate(ModelSize.from_model(llama.float()), ddp(4), Layout()).kept["optimizer"] == 8 * count
    assert estimate(size, ddp(2), Layout(), 100, trained=False).kept == {"weights": 2 * count}
    saved = estimate(size, ddp(2), Layout(), 100, checkpointing=True).step["activations"]
    assert saved < 0.7 * usage.step["activations"]
    assert "weights" in str(usage)


def test_a_model_without_memory_is_measured() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True))
    assert ModelSize.from_model(model).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_what_does_not_fit_names_the_setting_that_helps(llama: PreTrainedModel) -> None:
    size, actor = ModelSize.from_model(llama), {"max_tokens_per_micro_batch": 1 << 20}
    config = build_config({"actor_rollout_ref": {"model": {"path": "x"}, "actor": actor}, "data": {"train": "x"}})
    check = partial(actor_memory, config, size, Layout(), head=CPU)
    usage = check(1 << 50)
    by_token = usage.step["activations"] + usage.step["head"]
    fixed = usage.resting - size.weight_bytes
    with pytest.raises(ConfigError, match=r"actor\.max_tokens_per_micro_batch=262144 \(now 1048576\)$"):
        check(int(fixed + by_token / 3))
    least = estimate(size, ddp(size.itemsize), Layout(), 256, checkpointing=True)
    with pytest.raises(ConfigError, match=r"and actor_rollout_ref\.model\.enable_gradient_checkpointing=true"):
        check(int(least.peak - size.weight_bytes))
    with pytest.raises(ConfigError, match="smaller model"):
        check(1000)


def test_the_head_is_counted_by_the_sizes_of_its_device() -> None:
    logits, weight = 16384 * 152_064, 152_064 * 3584
    assert CPU.work_bytes(logits, weight, 2) == 64 << 20
    chunk = 80_000_000_000 // 512
    # bf16 logits and two copies of them in fp32.
    assert HeadSizes.of(80e9).work_bytes(logits, weight, 2) == chunk * (2 + 2 * 4)
    assert HeadSizes.of(80e9).work_bytes(1000, weight, 2) == 1000 * 2 + 2 * chunk  # a piece of the gradient is more
    assert HeadSizes.of(None) == CPU
