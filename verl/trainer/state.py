"""A trainer's whole state as a checkpoint's contents, and back.

actor/weights, critic/weights, ...        live weights under their Hugging Face names
actor/optimizer, critic/optimizer, ...    masters and moments
actor/config.json, actor/probe.json       the architecture, and log-probs of a few tokens to verify a reload by
buffer.parquet                            samples that wait for an update
random                                    process-wide random generators
trainer.json                              steps, the algorithm's state, optimizer counters, the caller's own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.batch import Batch
from verl.controller.once import on_main
from verl.controller.ranks import is_main, torchrun_ranks
from verl.errors import CheckpointError
from verl.models.shards import load_model_shards, model_shards
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.shard import checksum
from verl.trainer.checkpoint import (
    Checkpoint,
    SaveResult,
    VerifyReport,
    load_checkpoint,
    model_identity,
    save_checkpoint,
)
from verl.trainer.checkpoint import verify as verify_files
from verl.trainer.rng import rng_state, set_rng_state
from verl.training.optimizer import check_masters, check_optimizer, optimizer_name

if TYPE_CHECKING:
    from verl.trainer.trainer import Trainer

_PROBE_TOKENS = [1, 5, 3, 8, 2, 13, 7, 21]


def save(trainer: Trainer, path: Path) -> SaveResult:
    """Write a checkpoint. Of several ranks the first writes, once all have brought what they hold."""
    files, ours = contents(trainer), identity(trainer)
    return on_main(f"save {path}", lambda: save_checkpoint(path, trainer.steps, files, ours))


def load(trainer: Trainer, path: Path) -> None:
    """Restore a checkpoint that rank 0 has found whole; every rank reads it."""
    ours = identity(trainer)
    # A run of `verl train` says what all its settings were, which a trainer does not know of itself.
    restore(trainer, on_main(f"load {path}", lambda: load_checkpoint(path, ours, unknown=("settings",))))


def identity(trainer: Trainer) -> dict[str, str]:
    """What a checkpoint must have in common with the trainer that loads it."""
    found = {"algorithm": trainer.algorithm.name or type(trainer.algorithm).__name__}
    for role, handle in _roles(trainer).items():
        found |= model_identity(role, _architecture(handle), model_shards(handle.model))
    if reference := trainer.actor.reference_model:
        found["reference.sha256"] = checksum(model_shards(reference))
    return found


def contents(trainer: Trainer, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `save_checkpoint` writes; `extra` is the caller's own JSON. All ranks bring what they hold."""
    random_tensors, random_meta = rng_state()
    counters: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for role, handle in _roles(trainer).items():
        tensors, counters[role] = handle.state()
        files[f"{role}/weights"] = handle.shards
        files[f"{role}/optimizer"] = tensors
    state = {
        "steps": trainer.steps,
        "skipped": trainer.skipped,
        "algorithm": trainer.algorithm.state_dict(),
        "sources": {role: source.state_dict() for role, source in trainer.sources.items()},
        "roles": counters,
        "random": random_meta,
        "loader": None if trainer.loader is None else trainer.loader.state_dict(),
        "extra": dict(extra or {}),
    }
    files |= {
        "actor/config.json": trainer.actor.model.config.to_dict(),
        "actor/probe.json": _probe(trainer.actor.group.call, trainer.actor.model, trainer.actor.head),
        "buffer.parquet": trainer.buffer.state(),
        "random": random_tensors,
        "trainer.json": state,
        **trainer.extra_files(),
    }
    if torchrun_ranks() > 1:
        # Drawn whole before the first byte is written: a disk that fails must not leave ranks waiting in a stream.
        for name, content in files.items():
            if callable(content):
                files[name] = [shard for shard in content() if is_main()]
    return files


def restore(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Put the trainer where the checkpoint was written; returns `extra`.

    Raises:
        CheckpointError: an optimizer, a reward or the dtype of the weights is another; nothing has been replaced then.
    """
    state = checkpoint.json("trainer.json")
    for role, handle in _roles(trainer).items():
        options = handle.train_options
        check_optimizer(optimizer_name(options.optimizer), state["roles"][role])
        if options.optimizer is None:  # which weights a caller's own trains, it alone knows
            trained = {name: weight for name, weight in handle.model.named_parameters() if weight.requires_grad}
            check_masters(trained, {shard.name for shard in checkpoint.shards(f"{role}/optimizer")})
    _restore_sources(trainer, state["sources"])
    for role, handle in _roles(trainer).items():
        handle.load_shards(checkpoint.shards(f"{role}/weights"))
        handle.load_state(checkpoint.tensors(f"{role}/optimizer"), state["roles"][role])
    trainer.steps, trainer.skipped = state["steps"], state["skipped"]
    trainer.place = state.get("loader")
    trainer.algorithm.load_state_dict(state["algorithm"])
    trainer.buffer.load_state(checkpoint.batch("buffer.parquet"))
    trainer.load_extra_files(checkpoint)
    set_rng_state(checkpoint.tensors("random"), state["random"])
    extra: dict[str, Any] = state["extra"]
    return extra


def _restore_sources(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Restore rewards and costs: all, or none if one refuses."""
    before = {role: source.state_dict() for role, source in trainer.sources.items()}
    try:
        for role, source in trainer.sources.items():
            source.load_state_dict(states.get(role, {}))
    except CheckpointError:
        for role, source in trainer.sources.items():
            source.load_state_dict(before[role])
        raise


def verify(path: str | Path) -> VerifyReport:
    """Check a checkpoint through: digests, tensors, and the reloaded actor's forward pass against the one noted when
    it was saved."""
    report = verify_files(path)
    if not report.ok:
        return report
    checkpoint = load_checkpoint(path)
    if "actor/probe.json" not in checkpoint:
        return report
    _, fault = rebuild(checkpoint)
    if fault is not None:
        report.problems.append(fault)
    return report


def rebuild(checkpoint: Checkpoint) -> tuple[Any, str | None]:
    """The actor's model, made anew from a checkpoint, and what is wrong with it: None if its outputs are those noted
    when it was saved.

    Raises:
        CheckpointError: the checkpoint holds no actor, or one that cannot be made anew here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.models.heads import ValueModel, width_of
    from verl.models.portable import PortableModel
    from verl.workers.actor import ActorWorker, RolloutOptions, TrainOptions

    noted = checkpoint.json("actor/probe.json")
    settings = checkpoint.json("actor/config.json")
    try:
        config = AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, noted["dtype"])).eval()
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the model of {checkpoint.path} cannot be made by transformers alone ({error}): load the checkpoint into "
            "a Trainer over the model it was made from, and call trainer.actor.save_pretrained(path)"
        ) from error
    head = noted["head"]
    if head == "score":
        bias = [s.tensor for s in checkpoint.shards("actor/weights") if s.name == "score.bias"]
        backbone = ValueModel.from_model(model).backbone
        weight = torch.zeros(1, width_of(backbone))
        model = ValueModel(backbone, (weight, torch.zeros(1) if bias else None)).eval()
    load_model_shards(model, checkpoint.shards("actor/weights"))
    worker = ActorWorker(PortableModel(model), None, (), TrainOptions(), RolloutOptions(), head=head)
    found = _probe(lambda verb, batch: getattr(worker, verb)(batch), model, head)
    gap = max(abs(a - b) for a, b in zip(found["outputs"], noted["outputs"], strict=True))
    if gap <= noted["tolerance"]:
        return model, None
    return model, f"the reloaded actor's outputs differ by {gap:.3g} from those noted at the save"


def _probe(call: Callable[[str, Batch], Batch], model: Any, head: str) -> dict[str, Any]:
    """Log-probs (or the score) of a few fixed tokens under the live weights, by a verb of an actor's workers."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = [token % vocabulary for token in _PROBE_TOKENS]
    batch = Batch.from_columns({"prompt_tokens": [tokens[:2]], "response_tokens": [tokens[2:]]})
    backbone = getattr(model, "backbone", model)
    dtype = str(backbone.dtype).removeprefix("torch.")
    tolerance = {"float64": 1e-9, "float32": 1e-4}.get(dtype, 0.1)
    outputs = call("scores", batch)["scores"] if head == "score" else call("log_probs", batch)["log_probs"][0]
    return {"dtype": dtype, "tolerance": tolerance, "head": head, "outputs": outputs}


def _roles(trainer: Trainer) -> dict[str, Actor | Critic]:
    return {"actor": trainer.actor, **trainer.updater.critics}


def _architecture(handle: Actor | Critic) -> str:
    kind = getattr(handle.model, "backbone", handle.model)
    return type(kind).__name__
