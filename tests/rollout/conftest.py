"""Tiny random models and a byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from verl.models.packed import PackedModel

SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "phi3": ("Phi3Config", {"sliding_window": 11}),
    # Rotary embeddings that are others in rows of more than 32 tokens.
    "longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0}
            | {"short_factor": [1.0] * 16, "long_factor": [1.0 + i for i in range(16)]},
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    # Latent attention: keys of another size than the configuration's `head_dim`.
    "minicpm3": (
        "MiniCPM3Config",
        {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 24}
        | {"qk_rope_head_dim": 8, "v_head_dim": 32},
    ),
    "diffllama": ("DiffLlamaConfig", {}),
    "mamba": ("MambaConfig", {"state_size": 8, "time_step_rank": 8}),
    # Linear attention in every second layer.
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    # Learned positions, counted by place in the row.
    "bart": ("BartConfig", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4, "hidden_size": 32}),
}


def make_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    name, special = CONFIGS[kind]
    sizes = (
        SIZES
        if kind not in ("gpt2", "bloom", "bart")
        else {k: v for k, v in SIZES.items() if "_id" in k or "vocab" in k}
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**sizes, **special}), dtype=torch.float64)
    with torch.no_grad():  # initial weights are too small for attention to matter
        for parameter in model.parameters():
            parameter.normal_(0, 0.15) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


@pytest.fixture(scope="session", name="make_model")
def _make_model() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture(scope="module")
def packed64() -> PackedModel:
    return PackedModel(make_model("llama"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: a character outside ASCII takes several."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
