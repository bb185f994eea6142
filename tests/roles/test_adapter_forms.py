"""Every form of peft's adapters is computed, compared with its base and exported exactly, or refused when the actor is
made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

import verl
from tests.conftest import byte_tokenizer
from tests.exact import norm_in_fp64
from verl.errors import ModelError
from verl.models.loading import load_model

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 128}
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
PROMPTS = ["Why", "Two and"]
LORA: Callable[..., Any] = lambda **options: peft.LoraConfig(  # noqa: E731
    **{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **options}
)
ACCEPTED: dict[str, Callable[[], Any]] = {
    "lora": LORA,
    "rslora": lambda: LORA(use_rslora=True),
    "dora": lambda: LORA(use_dora=True),
    "rank_pattern": lambda: LORA(rank_pattern={"down_proj": 4}, alpha_pattern={"down_proj": 3}),
    "layers_to_transform": lambda: LORA(layers_to_transform=[1]),
    "bias=all": lambda: LORA(bias="all"),
    "bias=lora_only": lambda: LORA(bias="lora_only"),
    "modules_to_save=lm_head": lambda: LORA(modules_to_save=["lm_head"]),
    "modules_to_save=embed_tokens": lambda: LORA(modules_to_save=["embed_tokens"]),
    "modules_to_save=both": lambda: LORA(modules_to_save=["embed_tokens", "lm_head"]),
    "pissa": lambda: LORA(init_lora_weights="pissa"),
    "pissa, rslora, patterns": lambda: LORA(init_lora_weights="pissa", use_rslora=True, rank_pattern={"q_proj": 3}),
    "olora": lambda: LORA(init_lora_weights="olora"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lora_bias": lambda: LORA(lora_bias=True),
}
UNTIED_ALONE = {"trainable_token_indices": lambda: LORA(trainable_token_indices={"embed_tokens": [5, 9, 40]})}


def base_of(folder: Path, *, tied: bool, kind: str = "llama") -> Path:
    """The published base: a directory. Its biases are there, and are no zeros."""
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        **SIZES, **HEADS, **IDS, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True
    )
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, **HEADS, **IDS, num_local_experts=3, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3) if weight.dim() > 1 else weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def plain(path: Path, dtype: str = "float64") -> Any:
    model = load_model(path, dtype=dtype)
    if dtype == "float64":
        norm_in_fp64(model)
    return model


def adapted(base: Path, config: Any, dtype: str = "float64") -> Any:
    torch.manual_seed(1)
    model = plain(base, dtype)
    if isinstance(getattr(config, "init_lora_weights", True), str):
        model = model.float()  # peft takes apart nothing in fp64
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def actor_of(model: Any, **options: Any) -> verl.Actor:
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    return verl.Actor(model, byte_tokenizer(), optim={"lr": 3e-2}, sampling=sampling, **options)


def train(actor: verl.Actor, steps: int = 2) -> Any:
    for step in range(steps):
        rows = actor.generate_sequences(PROMPTS, n=2, key=f"k{step}")
        actor.update(rows, [1.0, 0.0, 0.0, 1.0])
    return rows


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.tensor([[5, 9, 33, 70, 40, 81], [3, 40, 5, 200, 9, 100]])
    return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def column(batch: Any, name: str) -> Tensor:
    return batch.tensor(name)  # type: ignore[no-any-return]


def check_form(base: Path, config: Any, folder: Path, dtype: str = "float64") -> None:
    """Policy and reference agree at first; the reference stays the published base; both exports are the live model."""
    # What peft takes out of the base, it rounds to fp32.
    exact = 1e-9 if dtype == "float64" else 1e-4
    rounding = 1e-4 if isinstance(getattr(config, "init_lora_weights", True), str) else exact
    published = actor_of(plain(base, dtype))
    actor = actor_of(adapted(base, config, dtype))
    rows = actor.generate_sequences(PROMPTS, n=2, key="first")
    before = column(published.compute_log_probs(rows), "log_probs")
    policy = column(actor.compute_log_probs(rows), "log_probs")
    assert gap(policy, before) < rounding
    assert gap(column(actor.compute_ref_log_probs(rows), "ref_log_probs"), policy) < exact
    train(actor)
    moved = column(actor.compute_log_probs(rows), "log_probs")
    assert gap(moved, before) > 1e-3
    assert gap(column(actor.compute_ref_log_probs(rows), "ref_log_probs"), policy) < exact
    assert torch.equal(column(actor.compute_log_probs(rows), "log_probs"), moved)
    live = logits(actor.present_model())
    actor.save_pretrained(str(folder / "merged"))
    assert gap(logits(plain(folder / "merged", dtype)), live) < exact
    # What reads the file without transformers' own check goes by the flag.
    tied = plain(folder / "merged").config.tie_word_embeddings
    with safe_open(folder / "merged" / "model.safetensors", "pt") as file:
        assert tied == ("lm_head.weight" not in file.keys())  # noqa: SIM118
    actor.save_pretrained(str(folder / "adapter"), adapter=True)
    model = peft.PeftModel.from_pretrained(plain(base, dtype), str(folder / "adapter"), autocast_adapter_dtype=False)
    assert gap(logits(model), live) < rounding


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", [*ACCEPTED])
def test_an_accepted_form_is_exact_at_every_edge(form: str, tied: bool, tmp_path: Path) -> None:
    check_form(base_of(tmp_path / "base", tied=tied), ACCEPTED[form](), tmp_path)


@pytest.mark.parametrize("form", [*UNTIED_ALONE])
def test_forms_that_need_an_output_layer_of_its_own(form: str, tmp_path: Path) -> None:
    check_form(base_of(tmp_path / "base", tied=False), UNTIED_ALONE[form](), tmp_path)
    with pytest.raises(ModelError, match="output layer has an adapter"):
        actor_of(adapted(base_of(tmp_path / "tied", tied=True), UNTIED_ALONE[form]()))


def test_stacked_experts(tmp_path: Path) -> None:
    config = LORA(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    # torch multiplies no groups of matrices in fp64.
    check_form(base_of(tmp_path / "base", tied=False, kind="mixtral"), config, tmp_path, "float32")
