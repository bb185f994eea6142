"""Tiny random models of several architectures, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.exact import norm_in_fp64

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "phi3": ("Phi3Config", {"sliding_window": 4}),
    "mistral": ("MistralConfig", {"sliding_window": 3}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 4.0}),
    # Soft-capped attention, and attention outside the interface: the padded path.
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "lru_width": 32,
            "attention_window_size": 8,
            "logits_soft_cap": 2.0,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4, "hidden_size": 32}),
}


def make_model(kind: str, dtype: torch.dtype = torch.float64, **options: object) -> PreTrainedModel:
    name, special = CONFIGS[kind]
    sizes = SIZES if kind not in ("gpt2", "bloom") else {k: SIZES[k] for k in SIZES if "_id" in k or k[:5] == "vocab"}
    config = getattr(transformers, name)(**{**sizes, **special, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # initial weights are too small for attention to matter
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    if dtype == torch.float64:
        norm_in_fp64(model)
    return model.eval()


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(name="make_model")
def make_model_fixture() -> Callable[..., PreTrainedModel]:
    return make_model
