"""Models that the caller has wrapped for sharded training, in a real job of gloo ranks: this file is its own script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import verl
from tests.ranks import job
from verl.errors import ConfigError, ModelError
from verl.weights.shard import checksum

PROMPTS = ["Hello", "Good day"]


def wrapped(path: str, how: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.model.embed_tokens.requires_grad_(how != "fsdp1-orig")  # use_orig_params takes frozen weights
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=how == "fsdp1-orig", device_id=cpu)


def parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter."""
    held = {name: weight.detach() for name, weight in model.named_parameters()}
    return {name: getattr(weight, "_local_tensor", weight).clone() for name, weight in held.items()}


def trained(bare: verl.Actor, model: torch.nn.Module, actor: verl.Actor) -> dict[str, float | bool | str]:
    """How far log-probs are from those of the bare model, and what a step of a trainer does."""
    before = parts(model)
    sequences = bare.generate_sequences(PROMPTS, n=2, key="k")
    own = actor.compute_log_probs(sequences).tensor("log_probs")
    metrics = verl.Trainer(actor, None, lambda responses: [float(len(r)) for r in responses], n=2, log_dir=False).step(
        PROMPTS
    )
    after = parts(model)
    embedding = actor.model.get_input_embeddings().weight
    return {
        "type": type(actor.model).__name__,
        "off": float((own - bare.compute_log_probs(sequences).tensor("log_probs")).abs().max()),
        "grad_norm": metrics["grad_norm/actor"],
        "embedding is trained": embedding.requires_grad,
        "learnt": float((actor.compute_log_probs(sequences).tensor("log_probs") - own).abs().max()),
        "wrapped stays": all(bool((before[name] == after[name]).all()) for name in before),
        "refusal": refusal(model),
    }


def refusal(model: torch.nn.Module) -> str:
    try:
        verl.Actor(model=model, optim=torch.optim.SGD(model.parameters(), lr=0.1)).compute_log_probs(
            verl.Batch.from_columns({"prompt_tokens": [[5, 6]], "response_tokens": [[7]]})
        )
    except (ConfigError, ModelError) as error:
        return str(error)
    return ""


def run(path: Path, ways: list[str], ranks: int) -> list[dict[str, Any]]:
    done = job(ranks, __file__, path, *ways)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_wrapped_model_is_trained_as_the_bare_one(tiny: Path) -> None:
    ways = ["fsdp1-orig", "fsdp1-flat", "fsdp2"]
    for how, found in zip(ways, run(tiny, ways, ranks=1), strict=True):
        assert found["type"] == "LlamaForCausalLM"
        assert found["off"] < 1e-12, how
        assert found["grad_norm"] > 0
        assert found["embedding is trained"] == (how != "fsdp1-orig")
        assert found["learnt"] > 1e-4
        assert found["wrapped stays"], how
        assert "the optimizer holds" in found["refusal"], how


@pytest.mark.slow
def test_a_model_wrapped_over_two_ranks_is_trained_on_both(tiny: Path) -> None:
    ways = ["fsdp1-orig", "fsdp1-flat", "fsdp2"]
    for how, found in zip(ways, run(tiny, ways, ranks=2), strict=True):
        assert found["off"] < 1e-12, how
        assert found["grad_norm"] > 0
        assert found["learnt"] > 1e-4
        assert found["wrapped stays"], how
        assert "before the first call" in found["refusal"]  # given to a handle on rank 0 alone


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path, *ways = sys.argv[1:]
    # Every rank wraps and hands over its part before the first call: after it only rank 0 runs the script.
    options: dict[str, Any] = {"sampling": verl.SamplingParams(max_new_tokens=6), "optim": {"lr": 1e-2}}
    handed = []
    for how in ways:
        model = wrapped(path, how)
        handed.append((verl.Actor(path, dtype="float64", **options), model, verl.Actor(model=model, **options)))
    answers = [trained(*one) for one in handed]
    sys.stdout.write("".join(f"{json.dumps(answer)}\n" for answer in answers))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_compiled_model_is_the_model(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    trainer = verl.PPOTrainer(
        torch.compile(model), reward_fn=lambda texts: [1.0] * len(texts), sampling={"max_new_tokens": 2}, log_dir=False
    )
    trainer.step(["a", "b"])
    trainer.save_checkpoint(tmp_path / "checkpoint")
    other = verl.Actor(str(tiny))
    other.load_shards(trainer.actor.shards())
    assert trainer.actor.model is model and checksum(other.shards()) == checksum(trainer.actor.shards())
    with pytest.raises(ModelError, match=r"wrapped as DataParallel: give its \.module"):
        verl.Actor(torch.nn.DataParallel(model))  # type: ignore[arg-type]
