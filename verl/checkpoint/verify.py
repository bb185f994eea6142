"""Check a checkpoint through, and rebuild its actor, for `verl verify` and `verl export`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.schema import Probe, SavedBase, SavedLayers
from verl.checkpoint.state import check_moments, check_random, check_weights, probe, read_probe, read_state
from verl.checkpoint.store import Checkpoint, load_checkpoint
from verl.errors import CheckpointError, ModelError
from verl.models.int4 import to_int4
from verl.models.lora import change_layers
from verl.models.source import ModelFiles
from verl.weights.shards import model_shards, on_meta, outline, take_weights
from verl.weights.tensor_files import is_finite
from verl.workers.actor import ActorWorker


@dataclass
class VerifyReport:
    """What `verify` found; `problems` is empty for a good checkpoint."""

    path: Path
    step: int | None = None
    files: int = 0
    nbytes: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.path}: " + "; ".join(self.problems)
        size = f"{self.nbytes / 1e6:.1f} MB"
        return f"{self.path}: whole (step {self.step}, {self.files} files, {size}, {self.tensors} tensors, all finite)"


def verify(path: str | Path) -> VerifyReport:
    """Check a checkpoint through: digests, every tensor loaded and finite, JSON and tables readable; of a trainer's
    also the states, and the reloaded actor's forward pass against the one noted when it was saved."""
    report = VerifyReport(Path(path))
    try:
        checkpoint = load_checkpoint(path)
        report.step, report.files = checkpoint.step, len(checkpoint.files)
        report.nbytes = sum((checkpoint.path / name).stat().st_size for name in checkpoint.files)
        for name in checkpoint.files:
            if name.endswith(".json"):
                checkpoint.json(name)
            elif name.endswith(".parquet"):
                checkpoint.batch(name)
        for stem in sorted({name.rpartition("-")[0] for name in checkpoint.files if name.endswith(".safetensors")}):
            for shard in checkpoint.shards(stem):
                report.tensors += 1
                if not is_finite(shard.tensor):
                    report.problems.append(f"tensor '{shard.name}' of {stem} has values that are not finite")
        if report.ok and "actor/probe.json" in checkpoint:
            state = read_state(checkpoint)
            check_random(checkpoint, state)
            for role, saved in state.roles.items():
                stream = checkpoint.shards(f"{role}/weights")
                shapes = {shard.name: torch.empty(shard.global_shape, device="meta") for shard in stream}
                # A caller's torch AdamW has the same name, but saves its parameter groups.
                is_ours = saved.optimizer == "AdamW" and not saved.groups
                check_moments(checkpoint, role, shapes, saved, is_adamw=is_ours)
            if (fault := rebuild(checkpoint)[1]) is not None:
                report.problems.append(fault)
    except CheckpointError as error:
        report.problems.append(str(error))
    return report


def rebuild(checkpoint: Checkpoint) -> tuple[Any, str | None]:
    """The actor's model, rebuilt from a checkpoint, and its fault: None if its outputs match those noted at the save.

    Raises:
        CheckpointError: the checkpoint holds no actor, or one that cannot be made here.
    """
    from verl.models.portable import PortableModel
    from verl.rollout.options import SamplerOptions
    from verl.training.options import EngineOptions

    noted = read_probe(checkpoint)
    base = read_state(checkpoint).roles["actor"].base if "trainer.json" in checkpoint else None
    model = _on_base(checkpoint, noted, base) if base is not None else _from_config(checkpoint, noted)
    weights = {name: weight for name, weight in outline(model).items() if base is None or weight.requires_grad}
    check_weights(checkpoint, "actor", weights)
    # A checkpoint of adapters alone lacks the base's weights, which the model has already.
    of_base = (shard for shard in model_shards(model) if shard.name not in weights)
    take_weights(model, chain(of_base, checkpoint.shards("actor/weights")))
    worker = ActorWorker(PortableModel(model), None, (), EngineOptions(), SamplerOptions(), head=noted.head)
    outputs = probe(lambda method, batch: method(worker, batch), model, noted.head)["outputs"]
    gap = max(abs(a - b) for a, b in zip(outputs, noted.outputs, strict=True))
    if gap <= noted.tolerance:
        return model, None
    return model, f"the reloaded actor's outputs differ by {gap:.3g} from those noted at the save"


def _from_config(checkpoint: Checkpoint, noted: Probe) -> Any:
    """The model that a checkpoint holds whole, without weights (`verl.weights.shards`)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.models.heads import ValueModel, width_of

    settings = checkpoint.json("actor/config.json", dict[str, Any])
    try:
        config = AutoConfig.for_model(**settings)
        model = on_meta(partial(AutoModelForCausalLM.from_config, config, dtype=getattr(torch, noted.dtype)))
    except Exception as error:  # the settings may say anything
        raise CheckpointError(
            f"the model of {checkpoint.path} cannot be made by transformers alone ({error}): load the checkpoint into "
            "a Trainer over the model it was made from, and call trainer.actor.save_pretrained(path)"
        ) from error
    if noted.head == "score":
        bias = any(shard.name == "score.bias" for shard in checkpoint.shards("actor/weights"))
        backbone = ValueModel.from_model(model).backbone
        head = (torch.zeros(1, width_of(backbone)), torch.zeros(1) if bias else None)
        model = ValueModel(backbone, head).eval()
    if "actor/layers.json" in checkpoint:
        change_layers(model, checkpoint.json("actor/layers.json", SavedLayers).model_dump())
    return model


def _on_base(checkpoint: Checkpoint, noted: Probe, base: SavedBase) -> Any:
    """The model of a checkpoint of adapters alone, over its base; the adapters' weights are still to come.

    Raises:
        CheckpointError: the base is not there any more, or is another.
    """
    files = ModelFiles(base.path, "score" if noted.head == "score" else "causal", noted.dtype)
    try:
        if files.digest != base.sha256:
            raise ModelError(f"its files are not there or have changed (SHA-256 of then: {base.sha256})")
        model = files.load()
    except ModelError as error:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters alone, and their base at {base.path} cannot be read: {error}. Put the "
            "base back there"
        ) from error
    layers = checkpoint.json("actor/layers.json", SavedLayers)
    if layers.int4:
        to_int4(getattr(model, "backbone", model))
    change_layers(model, {**layers.model_dump(), "int4": []})
    return model
