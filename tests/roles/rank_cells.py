"""Cells of the matrix of layouts: an actor trains, generates, is saved and exported; one job for many of them.

python rank_cells.py FOLDER CELLS, the last as JSON: name -> cell. Prints one line of JSON a cell: its name, why it was
refused, or null, and its seconds. FOLDER/NAME then has run.json, weights.pt, a checkpoint, and a
directory for transformers.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

import verl
from tests.exact import ExactRMSNorm, ExactRouter
from verl.errors import ConfigError
from verl.weights.tensor_files import files_of
from verl.workers.trained import TrainedWorker

PROMPTS = ["Once upon a time", "A", "And"]


def reward(responses: list[str]) -> list[float]:
    return [sum(map(ord, text)) % 7 / 7 for text in responses]


def make_exact() -> None:
    """Norms and routers compute in the dtype of their input."""
    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3MoeRMSNorm):
        norm.forward = ExactRMSNorm.forward
    Qwen3MoeTopKRouter.forward = ExactRouter.forward


def make_actor(folder: Path, cell: dict[str, Any]) -> verl.Actor:
    return verl.Actor(
        str(folder / cell["model"]),
        dtype=cell["dtype"],
        # A step that is not the sign of a gradient: a rounding of fp32 stays one.
        optim={"lr": 1e-2, "adam_eps": 1e-2},
        train=cell.get("train"),
        placement=cell.get("placement"),
        sampling=verl.SamplingParams(max_new_tokens=6),
        mini_batch_size=12,
        max_tokens_per_micro_batch=64,
        **({"lora": {"r": 2}} if cell.get("lora") else {}),
        **cell.get("rollout", {}),
    )


def steps(actor: verl.Actor, count: int) -> dict[str, Any]:
    """Training of some steps: samples and metrics of each."""
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False)
    samples, learn = [], trainer.learn

    def noted(drawn: Mapping[str, verl.Batch]) -> dict[str, Any]:
        (batch,) = drawn.values()
        samples.append({name: batch[name] for name in ("id", "response_tokens", "rollout_log_probs")})
        return learn(drawn)

    trainer.learn = noted  # type: ignore[method-assign]
    records = [trainer.step(PROMPTS) for _ in range(count)]
    return {
        "samples": samples,
        "metrics": [{k: r[k] for k in ("loss/actor", "grad_norm/actor", "reward")} for r in records],
    }


def run(folder: Path, out: Path, cell: dict[str, Any]) -> str | None:
    """Why it was refused before anything was started; what is refused later is an error."""
    try:
        actor = make_actor(folder, cell)
        actor.group  # noqa: B018
    except ConfigError as error:
        return str(error)
    found = steps(actor, 2)
    weights = {shard.name: shard.tensor.cpu().clone() for shard in actor.shards()}
    (out / "checkpoint").mkdir(parents=True)
    meta = actor.save(str(out / "checkpoint"))
    written = actor.group.call(TrainedWorker.saved)
    assert written is not None
    actor.save_pretrained(str(out / "export"))
    after = actor.generate_sequences(PROMPTS, key="after")
    found["after"] = list(after["response_tokens"])
    torch.save(weights, out / "weights.pt")
    (out / "run.json").write_text(json.dumps({**found, "meta": meta}))
    return None


def load(folder: Path, out: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """A step of one process that goes on from the checkpoint of a cell."""
    actor = make_actor(folder, {key: cell[key] for key in ("model", "dtype", "lora") if key in cell})
    names = [path.name for path in (out / "checkpoint").iterdir()]
    weights, optimizer = (
        [str(out / "checkpoint" / name) for name in files_of(stem, names)] for stem in ("weights", "optimizer")
    )
    actor.load(weights, optimizer, json.loads((out / "run.json").read_text())["meta"])
    return steps(actor, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_exact()
    root = Path(sys.argv[1])
    for name, one_cell in json.loads(sys.argv[2]).items():
        refused, began = None, time.monotonic()
        try:
            if one_cell.get("loads"):
                done = load(root, root / one_cell["loads"], one_cell)
                (root / one_cell["loads"] / "loaded.json").write_text(json.dumps(done))
            else:
                refused = run(root, root / name, one_cell)
        except Exception:
            refused = "!! " + traceback.format_exc()[-600:]
        seconds = time.monotonic() - began
        sys.stdout.write(json.dumps({"cell": name, "refused": refused, "seconds": seconds}) + "\n")
        sys.stdout.flush()
