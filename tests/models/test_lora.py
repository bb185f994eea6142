"""Adapters in a model: what they change, what is trained, and what is written of them."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.exact import norm_in_fp64
from tests.training.cases import OPTIM, ROWS, log_probs, make_engine, ragged_batch, state_of, tiny_model, update
from verl.errors import ConfigError, ModelError
from verl.models.heads import ValueModel
from verl.models.loading import load_model
from verl.models.lora import adapters_off, add_lora, change_layers, has_adapters, layer_changes, merged_shards, shape_of
from verl.models.options import LoraOptions
from verl.models.outputs import outputs
from verl.models.packed import PackedModel
from verl.models.portable import PortableModel, unwrapped
from verl.models.save import save_pretrained_dir
from verl.weights.layout import Layout
from verl.weights.shard import checksum
from verl.weights.shards import load_model_shards, model_shards

KINDS = ["llama", "gpt2"]


def adapted(kind: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> PreTrainedModel:
    """A model whose adapters are not zero."""
    model = tiny_model(kind, dtype)
    add_lora(model, LoraOptions(**{"r": 4, "alpha": 8, **options}))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(12)[None] % 37, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapters_change_nothing_and_are_all_that_is_trained(kind: str) -> None:
    plain, model = tiny_model(kind), tiny_model(kind)
    add_lora(model, LoraOptions(r=4))
    assert torch.equal(logits(model), logits(plain))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    engine, batch = make_engine(model, optim=OPTIM), ragged_batch(ROWS)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    update(engine, batch)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name.rpartition(".")[0] for name in state_of(engine)} == set(trained)


def test_equal_seeds_give_equal_adapters() -> None:
    models = [tiny_model() for _ in range(3)]
    before = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        add_lora(model, LoraOptions(), seed)
    assert torch.equal(torch.get_rng_state(), before)
    one, same, other = (checksum(model_shards(model)) for model in models)
    assert one == same != other


@pytest.mark.parametrize("kind", KINDS)
def test_the_packed_forward_is_the_models_own(kind: str) -> None:
    model = adapted(kind)
    packed = PackedModel(model)
    assert packed.supports_packed and packed.fused is None


@pytest.mark.parametrize("kind", KINDS)
def test_without_adapters_it_is_the_base_and_they_stay_trained(kind: str) -> None:
    plain, model = tiny_model(kind), adapted(kind)
    flags = [weight.requires_grad for weight in model.parameters()]
    with adapters_off(model):
        assert torch.equal(logits(model), logits(plain))
        assert [weight.requires_grad for weight in model.parameters()] == flags
    assert float((logits(model) - logits(plain)).abs().max()) > 1e-3
    engine, base, batch = make_engine(model, optim=OPTIM), make_engine(tiny_model(kind)), ragged_batch(ROWS)
    found = engine.predict(batch, ("log_probs",), adapters=False)["log_probs"]
    assert torch.equal(found, log_probs(base, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_equal_plain_model_and_the_live_ones_stay(kind: str) -> None:
    model, plain = adapted(kind), tiny_model(kind)
    before = checksum(model_shards(model))
    load_model_shards(plain, merged_shards(model))
    assert float((logits(plain) - logits(model)).abs().max()) < 1e-10
    assert checksum(model_shards(model)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_directories_of_a_merged_model_and_of_adapters(kind: str, tmp_path: Path) -> None:
    model = adapted(kind)
    save_pretrained_dir(model, None, tmp_path / "merged")
    save_pretrained_dir(model, None, tmp_path / "adapter", adapter=True)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [type(model).__name__]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    if kind == "llama":
        norm_in_fp64(merged)
    base = tiny_model(kind)
    from_peft = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"), autocast_adapter_dtype=False)
    for found in (merged, from_peft):
        assert float((logits(found) - logits(model)).abs().max()) < 1e-10
    with pytest.raises(ModelError, match="no adapters"):
        save_pretrained_dir(tiny_model(kind), None, tmp_path / "none", adapter=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_with_adapters_travels(dtype: torch.dtype) -> None:
    for model in (adapted(dtype=dtype), ValueModel.from_model(adapted(dtype=dtype))):
        travelled = pickle.loads(pickle.dumps(PortableModel(model))).model
        assert checksum(model_shards(travelled)) == checksum(model_shards(model))
        own, other = ({n: (w.requires_grad, w.dtype) for n, w in m.named_parameters()} for m in (model, travelled))
        assert own == other
    saved = json.loads(json.dumps(layer_changes(model)))
    saved["adapters"]["config"]["peft_type"] = "unheard of"
    with pytest.raises(ModelError, match="layers cannot be made"):
        change_layers(tiny_model(), saved)


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .*q_prj"):
        add_lora(tiny_model(), LoraOptions(targets=["q_prj"]))
    with pytest.raises(ConfigError, match="already"):
        add_lora(adapted(), LoraOptions())
    with pytest.raises(ModelError, match="output layer has an adapter"):
        make_engine(adapted(targets=["lm_head"]), optim=OPTIM)


def test_a_peft_model_is_taken_with_its_adapters() -> None:
    given: Any = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    model = unwrapped(given)
    assert model is given.get_base_model() and has_adapters(model)
    engine = make_engine(model, optim=OPTIM)
    before = logits(given)
    for _ in range(2):
        update(engine, ragged_batch(ROWS))
    assert float((logits(given) - before).abs().max()) > 1e-3
    with pytest.raises(ModelError, match="get_base_model"):
        PackedModel(given)


def test_adapters_that_cannot_be_trained_here_are_refused() -> None:
    prompts: Any = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ModelError, match="LoRA"):
        unwrapped(prompts)
    several: Any = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"]))
    several.add_adapter("second", peft.LoraConfig(target_modules=["v_proj"]))
    with pytest.raises(ModelError, match=r"default, second"):
        unwrapped(several)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["norm"]}])
def test_other_settings_of_peft_merge_and_travel(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    given: Any = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"], **options))
    model = given.get_base_model()
    engine = make_engine(model, optim=OPTIM)
    for _ in range(2):
        update(engine, ragged_batch(ROWS))
    travelled = PortableModel.of_parts(PortableModel(model).parts()).model
    plain = copy.deepcopy(tiny_model())
    load_model_shards(plain, merged_shards(model))
    for found in (travelled, plain):
        assert float((logits(found) - logits(model)).abs().max()) < 1e-6


@pytest.mark.quick("mixtral")
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_in_fp64_are_written_and_compared(kind: str, tmp_path: Path) -> None:
    save_pretrained_dir(tiny_model(kind), None, tmp_path / "made")
    model = load_model(str(tmp_path / "made"), dtype="float64")
    save_pretrained_dir(model, None, tmp_path / "loaded")
    again = load_model(str(tmp_path / "loaded"), dtype="float64")
    assert float((outputs(again) - outputs(model)).abs().max()) < 1e-9


def test_experts_with_adapters_are_not_cut() -> None:
    model = tiny_model("qwen3_moe")
    Layout(tp=2).check(shape_of(model))
    Layout(ep=2).check(shape_of(model))
    add_lora(model, LoraOptions(r=2))
    for layout in (Layout(tp=2), Layout(ep=2)):
        with pytest.raises(ConfigError, match=r"are not cut by tp or ep"):
            layout.check(shape_of(model))
    attention = tiny_model("qwen3_moe")
    add_lora(attention, LoraOptions(r=2, targets=("q_proj", "v_proj")))
    Layout(tp=2).check(shape_of(attention))
    with pytest.raises(ConfigError, match="ZeRO of stage 3 trains no adapters"):
        Layout(shard=2).check(shape_of(attention), "deepspeed")
