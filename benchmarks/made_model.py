"""Make a model directory of random weights in a known model's shape, where no weights can be fetched.

    .venv/bin/python benchmarks/made_model.py qwen2.5-7b models/made-qwen2.5-7b [--device cuda] [--config-only]

Speed, memory and exactness do not depend on what the weights say. The tokenizer is a byte-level BPE over the
benchmarks' own text; ids beyond its few hundred entries have no text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import workload
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config

_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPES = {
    "tiny": lambda: Qwen2Config(
        **_IDS,
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    # Heads as wide as vLLM's kernels for CPU want them.
    "small": lambda: LlamaConfig(
        **_IDS,
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        **_IDS,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "smollm2-360m": lambda: LlamaConfig(
        **_IDS,
        vocab_size=49_152,
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": lambda: LlamaConfig(
        **_IDS,
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=5e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": lambda: Qwen2Config(
        **_IDS,
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": lambda: Qwen2Config(
        **_IDS,
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        rope_theta=1e6,
    ),
    "llama-3-8b": lambda: LlamaConfig(
        **_IDS,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=5e5,
        max_position_embeddings=8192,
    ),
}
_CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of the benchmarks' text, and bytes for all else."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=1,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(workload.texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>", chat_template=_CHAT)


def make(shape: str, directory: Path, device: str = "cpu", config_only: bool = False) -> Path:
    """The directory of that shape, made if it is not there: weights in bf16, initialised on `device` from seed 0."""
    if (directory / "tokenizer.json").is_file():
        return directory
    config: PreTrainedConfig = SHAPES[shape]()
    config.architectures = [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]]
    config.dtype = torch.bfloat16
    if config_only:
        config.save_pretrained(directory)
    else:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)  # last: what says that the directory is whole
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu", help="where the weights are initialised")
    parser.add_argument(
        "--config-only", action="store_true", help="without weights, as `verl train --dry-run` needs it"
    )
    args = parser.parse_args()
    print(make(args.shape, args.directory, args.device, args.config_only))


if __name__ == "__main__":
    main()
