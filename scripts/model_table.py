"""Write the table of docs/models.md: which settings a model fits with on a device, as the planner predicts it.

    python scripts/model_table.py            # rewrites the table in docs/models.md

No weights are read and nothing is fetched: models are made of the sizes below, which their `config.json` has.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl.algorithms import make_algorithm
from verl.config import load_config
from verl.errors import ConfigError
from verl.planner.hardware import Cluster
from verl.run.memory import memory_on

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by scripts/model_table.py -->\n", "<!-- end -->\n"
#: Layers, hidden size, size between, heads, heads of keys, vocabulary, tied embeddings.
MODELS = {
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151936, True),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 151936, True),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 152064, False),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128256, False),
    "Qwen2.5-32B": (64, 5120, 27648, 40, 8, 152064, False),
    "Llama-3.1-70B": (80, 8192, 28672, 64, 8, 128256, False),
}
DEVICES = ("1xL4", "1xA100", "1xH200", "8xA100", "8xH100")
_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
_CHECKPOINTING, _LORA = f"{_MODEL}.enable_gradient_checkpointing=true", f"{_MODEL}.lora={{r: 16}}"
_OFFLOAD = tuple(f"{_ACTOR}.fsdp_config.{part}_offload=true" for part in ("param", "optimizer"))
#: What is tried, in this order: the name of the table, and the settings.
WAYS = {
    "as it is": (),
    "checkpointing": (_CHECKPOINTING,),
    "fsdp": (f"{_ACTOR}.strategy=fsdp", _CHECKPOINTING),
    "fsdp, offloaded": (f"{_ACTOR}.strategy=fsdp", _CHECKPOINTING, *_OFFLOAD),
    "LoRA": (_CHECKPOINTING, _LORA),
}
_RUN = (
    "algorithm.name=grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.max_new_tokens=1024",
    "data.max_prompt_length=512", f"{_ACTOR}.max_tokens_per_micro_batch=8192",
)  # fmt: skip
#: Sequences of full length for which the cache has room at least.
_LEAST_SEQUENCES = 16


def model_directory(name: str, folder: Path) -> Path:
    """A directory with the configuration of a model, and no weights."""
    layers, hidden, between, heads, key_heads, vocabulary, tied = MODELS[name]
    kind = "llama" if name.startswith("Llama") else "qwen2"
    content = {
        "model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": between, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content))
    return path


def cell(model: Path, devices: str) -> str:
    """The first way that fits, with GB of a device's memory and of the cache among them; a dash: none does."""
    cluster = Cluster.parse(f"1x{devices}" if devices.count("x") == 1 else devices)
    for name, settings in WAYS.items():
        if name.startswith("fsdp") and cluster.size == 1:
            continue
        config = load_config(None, [f"{_MODEL}.path={model}", *_RUN, *settings])
        try:
            memory = memory_on(config, [make_algorithm("grpo")], cluster)
        except ConfigError:
            continue
        text = json.loads((model / "config.json").read_text())
        head = text["hidden_size"] // text["num_attention_heads"]
        a_token = 4 * text["num_hidden_layers"] * text["num_key_value_heads"] * head
        if memory.total <= cluster.device.memory and memory.kv_cache >= _LEAST_SEQUENCES * 1536 * a_token:
            return f"{name}: {memory.total / 1e9:.0f} GB ({memory.kv_cache / 1e9:.0f} cache)"
    return "–"


def table() -> Iterator[str]:
    sizes = [Cluster.parse(f"1x{devices}").device.memory / 1e9 for devices in DEVICES]
    yield "| model | " + " | ".join(f"{n}, {size:.0f} GB" for n, size in zip(DEVICES, sizes, strict=True)) + " |"
    yield "|---" * (len(DEVICES) + 1) + "|"
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            model = model_directory(name, Path(folder))
            yield f"| {name} | " + " | ".join(cell(model, devices) for devices in DEVICES) + " |"


def written(page: str) -> str:
    """The page with the table as it is predicted now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(table()) + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
