"""A trainer's whole state as a checkpoint's contents, and back.

actor/weights, critic/weights, ...        live weights under their Hugging Face names
actor/optimizer, critic/optimizer, ...    masters and moments
actor/config.json, actor/probe.json       the architecture, and log-probs of a few tokens to verify a reload by
actor/layers.json                         what layers of the actor have adapters or are in 4 bits, if any
actor/tokenizer/                          the tokenizer's own files, with the chat template of training
buffer.parquet                            samples that wait for an update
random                                    process-wide random generators
trainer.json                              steps, the algorithm's state, optimizer counters, the caller's own
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl._base.durable import parse_json
from verl._host import device
from verl.batch import Batch
from verl.checkpoint import store
from verl.checkpoint.schema import Probe, RandomState, RoleState, TrainerState
from verl.checkpoint.store import Checkpoint
from verl.cluster.controller import start
from verl.errors import CheckpointError, DamagedCheckpointError, DataError
from verl.models.lora import layer_changes
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.handle import check_base
from verl.training.optimizer import LIKE_THE_WEIGHT, MOMENTS, check_masters, check_optimizer, optimizer_name
from verl.weights.shard import Shard, names_digest
from verl.weights.tensor_files import is_finite
from verl.workers.actor import ActorWorker
from verl.workers.trained import TrainedWorker

if TYPE_CHECKING:
    from verl.data.prefetch import Loader
    from verl.trainer.loop import Loop

_PROBE_TOKENS = [1, 5, 3, 8, 2, 13, 7, 21]
#: Columns that samples in the buffer must have, and those that have one value a response token.
_SAMPLE = ("group", "prompt_tokens", "response_tokens")
_BY_TOKEN = ("response_mask", "rollout_log_probs", "log_probs", "ref_log_probs", "values")
_REQUIRED = ("trainer.json", "buffer.parquet", "random", "actor/config.json", "actor/probe.json")
_ADAMW = {"step", *MOMENTS}
#: The attributes of a trainer that `TrainerState` holds as they are.
_OWN = ("steps", "skipped", "updates", "idle", "position")


def save(trainer: Loop, path: Path) -> store.SaveResult:
    """Write a checkpoint."""
    start()
    return store.save_checkpoint(path, trainer.steps, *contents(trainer))


def load(trainer: Loop, path: Path) -> None:
    """Check a checkpoint, then restore it."""
    start()
    # A run of `verl train` records its settings, which a trainer outside of one does not have.
    checkpoint = store.load_checkpoint(path, identity(trainer), unknown=() if trainer.settings else ("settings",))
    check(trainer, checkpoint)
    restore(trainer, checkpoint)


def identity(trainer: Loop) -> dict[str, str]:
    """The properties that a checkpoint and the trainer that loads it must share."""
    parts = {}
    for name, task in trainer.tasks.items():
        key = "algorithm" if len(trainer.tasks) == 1 else f"task.{name}.algorithm"
        parts[key] = task.algorithm.name or type(task.algorithm).__name__
    for role, handle in trainer.roles.items():
        architecture = type(getattr(handle.modules, "backbone", handle.modules)).__name__
        parts |= store.model_identity(role, architecture, handle.outline)
    if digest := trainer.actor.reference.digest:
        parts["reference.sha256"] = digest
    if trainer.settings is not None:
        parts["settings"] = trainer.settings
    return parts


def contents(trainer: Loop, *, background: bool = False) -> tuple[dict[str, Any], dict[str, str], list[RoleWriter]]:
    """The arguments of `save_checkpoint`: files, the identity, and the ranks of each role as writers.

    Args:
        background: the tensors are copied to host memory and written while training goes on.
    """
    writers = [RoleWriter(role, handle, background) for role, handle in trainer.roles.items()]
    random_tensors, random_meta = rng_state()

    # A function, because it is called after all writers have begun: before that they have no `meta`.
    def trainer_json() -> dict[str, Any]:
        state = {name: getattr(trainer, name) for name in _OWN} | {
            "tasks": {
                name: {
                    "algorithm": task.algorithm.state_dict(),
                    "sources": {role: source.state_dict() for role, source in task.sources.items()},
                }
                for name, task in trainer.tasks.items()
            },
            "roles": {writer.role: writer.meta for writer in writers},
            "random": random_meta.model_dump(),
            "evaluation": None if trainer.held_out is None else trainer.held_out.state_dict(),
            "guards": [guard.state_dict() for guard in trainer.guards],
            "mixture": trainer.mixture.state_dict(),
        }
        try:
            parse_json(json.dumps(state).encode(), TrainerState)
        except (TypeError, ValueError) as error:
            raise CheckpointError(str(error)) from None
        return state

    actor = trainer.actor
    files = {
        "actor/config.json": actor.modules.config.to_dict(),
        "actor/probe.json": probe(actor.group.call, actor.modules, actor.head),
        # Templates and tokens that were set in Python are in no other file.
        f"{store.TOKENIZER}/": actor.tokenizer_as_trained.save_pretrained,
        "buffer.parquet": trainer.buffer.state(),
        "random": random_tensors,
        "trainer.json": trainer_json,
        **trainer.extra_files(),
    }
    if any((layers := layer_changes(actor.modules)).values()):
        files["actor/layers.json"] = layers
    return files, identity(trainer), writers


@dataclass
class RoleWriter:
    """The ranks of a role, which write their shards of tensors into a checkpoint.

    Attributes:
        meta: the role's state besides tensors, once it has begun.
    """

    role: str
    handle: Actor | Critic
    background: bool
    meta: dict[str, Any] = field(default_factory=dict)

    def begin(self, folder: Path) -> None:
        """Begin to write into a staging directory.

        Raises:
            OSError: the disk does not take it.
        """
        (folder / self.role).mkdir(exist_ok=True)
        self.meta = self.handle.save(str(folder / self.role), self.background)

    def end(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """`sha256` and `size` of every file, by its path in the directory; None: not all are written, and it shall not
        wait.

        Raises:
            OSError: the disk did not take it.
            CheckpointError: a content that a checkpoint cannot hold.
        """
        reports = self.handle.group.call(TrainedWorker.saved, wait)
        for rank in reports or ():
            if "errno" in rank:
                raise OSError(rank["errno"], rank["error"], rank["file"])
            if "error" in rank:
                raise CheckpointError(rank["error"])
        if reports is None:
            return None
        return {f"{self.role}/{name}": entry for rank in reports for name, entry in rank["files"].items()}


def check(trainer: Loop, checkpoint: Checkpoint, data: Loader | None = None) -> TrainerState:
    """Look through all that `restore` takes from a checkpoint; nothing is replaced.

    Args:
        data: what goes on at the saved position.

    Raises:
        DamagedCheckpointError: a file does not pass its schema, or disagrees with another.
        CheckpointError: an optimizer, a reward or the dtype of the weights is another.
        DataError: the held-out data, or `data`, are others.
    """
    roles = trainer.roles
    needed = [*_REQUIRED, *(f"{role}/{part}" for role in roles for part in ("weights", "optimizer"))]
    if lacking := [name for name in needed if name not in checkpoint]:
        raise checkpoint.damaged(f"it lacks {', '.join(lacking)}")
    state = read_state(checkpoint)
    if state.roles.keys() != roles.keys():
        raise checkpoint.damaged(f"trainer.json has the roles {sorted(state.roles)}, not {sorted(roles)}")
    for role, handle in roles.items():
        _check_role(checkpoint, role, handle, state.roles[role])
    read_probe(checkpoint)
    checkpoint.json("actor/config.json", dict[str, Any])
    _check_buffer(checkpoint)
    check_random(checkpoint, state)
    if state.tasks.keys() != trainer.tasks.keys():
        raise CheckpointError(
            f"{checkpoint.path} is of the tasks {', '.join(state.tasks)}, and these are {', '.join(trainer.tasks)}"
        )
    # Only the object itself knows whether it accepts a state. All are tried before `restore` replaces the first, so
    # that a refused checkpoint leaves the trainer as it was.
    for name, holder, saved in _holders(trainer, state, data):
        _try_state(checkpoint, name, holder, saved, may_differ=holder is data)
    try:
        trainer.read_extra_files(checkpoint, restore=False)
    except DataError as error:
        raise checkpoint.damaged(str(error)) from None
    if trainer.held_out is not None and state.evaluation is not None:
        trainer.held_out.check(state.evaluation.held_out.model_dump())
    return state


def restore(trainer: Loop, checkpoint: Checkpoint) -> None:
    """Restore the trainer from a checkpoint that has passed `check`."""
    state = read_state(checkpoint)
    for _, holder, saved in _holders(trainer, state):
        holder.load_state_dict(saved)
    for role, handle in trainer.roles.items():
        weights, optimizer = ([*map(str, checkpoint.paths(f"{role}/{part}"))] for part in ("weights", "optimizer"))
        handle.load(weights, optimizer, state.roles[role].model_dump(exclude_unset=True))
    for name in _OWN:
        setattr(trainer, name, getattr(state, name))
    if trainer.held_out is not None and state.evaluation is not None:
        results = state.evaluation.model_dump(exclude_unset=True)
        trainer.held_out.first, trainer.held_out.last = results["first"], results["last"]
    trainer.buffer.load_state(checkpoint.batch("buffer.parquet"))
    trainer.read_extra_files(checkpoint, restore=True)
    set_rng_state(checkpoint.tensors("random"), state.random)


def _holders(trainer: Loop, state: TrainerState, data: Loader | None = None) -> Iterator[tuple[str, Any, Any]]:
    """Objects with a `state_dict` of their own: the name in messages, the object, and the state that was saved."""
    for name, task in trainer.tasks.items():
        yield "algorithm", task.algorithm, state.tasks[name].algorithm
        for role, source in task.sources.items():
            yield role, source, state.tasks[name].sources.get(role, {})
    yield "the task scheduler", trainer.mixture, state.mixture
    yield from (("a guard", *pair) for pair in zip(trainer.guards, state.guards, strict=False))
    if data is not None and state.position is not None:
        yield "the data", data, state.position


def _try_state(checkpoint: Checkpoint, name: str, holder: Any, state: Any, *, may_differ: bool) -> None:
    """Load a state into an object to see that it is accepted, then restore the object's own.

    Args:
        may_differ: the object is data; then a DataError says that the state is of other data, which is no damage.
    """
    before = holder.state_dict()
    try:
        holder.load_state_dict(state)
    except DamagedCheckpointError as error:
        raise checkpoint.damaged(f"trainer.json: the state of {name}: {error}") from None
    except CheckpointError:
        raise
    except Exception as error:  # of whatever algorithm, reward or data the user has
        if may_differ and isinstance(error, DataError):
            raise
        raise checkpoint.damaged(f"trainer.json: the state of {name}: {type(error).__name__}: {error}") from None
    finally:
        holder.load_state_dict(before)


def read_state(checkpoint: Checkpoint) -> TrainerState:
    state: TrainerState = checkpoint.json("trainer.json", TrainerState)
    if state.steps != checkpoint.step:
        raise checkpoint.damaged(f"trainer.json says step {state.steps}, the manifest {checkpoint.step}")
    return state


def _check_role(checkpoint: Checkpoint, role: str, handle: Actor | Critic, state: RoleState) -> None:
    optimizer, weights = handle.train_options.optimizer, handle.outline
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    check_optimizer(optimizer_name(optimizer), state.model_dump(exclude_unset=True))
    names = check_moments(checkpoint, role, weights, state, is_adamw=optimizer is None)
    if optimizer is None:  # which weights a caller's own trains, it alone knows
        check_masters(trained, names)
    if state.base is not None:
        check_base(state.base.model_dump(), handle.base)
    check_weights(checkpoint, role, weights if state.base is None else trained)


def _check_buffer(checkpoint: Checkpoint) -> None:
    """Samples in the buffer have what every update reads, and numbers for each of their tokens."""
    samples = checkpoint.batch("buffer.parquet")
    if len(samples) and (lacking := [name for name in _SAMPLE if name not in samples]):
        raise checkpoint.damaged(f"buffer.parquet: its samples lack {', '.join(lacking)}")
    for name in (name for name in _BY_TOKEN if name in samples):
        written = samples.arrow(name).is_valid().to_pylist()
        pairs = zip(samples.lengths(name), samples.lengths("response_tokens"), written, strict=True)
        if any(here != tokens for here, tokens, is_there in pairs if is_there):
            raise checkpoint.damaged(f"buffer.parquet: {name} is not as long as response_tokens")


def check_random(checkpoint: Checkpoint, state: TrainerState) -> None:
    """Set the random generators to see that they take their state, then set them back."""
    before = rng_state()
    try:
        set_rng_state(checkpoint.tensors("random"), state.random)
    except CheckpointError as error:
        raise checkpoint.damaged(f"random: {error}") from None
    finally:
        set_rng_state(*before)


def _whole_tensors(checkpoint: Checkpoint, stem: str) -> Iterator[Shard]:
    """The shards of some tensors, which are finite and, once all have come, whole."""
    missing: dict[str, int] = {}
    for shard in checkpoint.shards(stem):
        if not is_finite(shard.tensor):
            raise checkpoint.damaged(f"{stem}: '{shard.name}' has values that are not finite")
        missing[shard.name] = missing.get(shard.name, math.prod(shard.global_shape)) - shard.tensor.numel()
        yield shard
    if cut := [name for name, count in missing.items() if count]:
        raise checkpoint.damaged(f"{stem}: '{cut[0]}' is incomplete")


def check_moments(
    checkpoint: Checkpoint, role: str, weights: Mapping[str, Tensor], state: RoleState, *, is_adamw: bool
) -> set[str]:
    """Look through an optimizer's tensors: whole, of this model, finite, and all that were saved; returns their names.

    Args:
        is_adamw: it is ours, of whose tensors more is known.
    """
    where, keys = f"{role}/optimizer", dict[str, set[str]]()
    for shard in _whole_tensors(checkpoint, where):
        name, _, key = shard.name.rpartition(".")
        tensor, is_like = shard.tensor, key in LIKE_THE_WEIGHT
        fits = name in weights and (not is_like or shard.global_shape == weights[name].shape)
        if is_adamw and key == "step":
            fits &= tensor.numel() == 1 and float(tensor) in range(state.completed_steps + 1)
        elif is_adamw:
            fits &= is_like and (key != "exp_avg_sq" or not tensor.numel() or bool(tensor.min() >= 0))
        if not fits or not tensor.is_floating_point():
            raise checkpoint.damaged(f"{where}: '{shard.name}' is not of this model, or cannot be")
        keys.setdefault(name, set()).add(key)
    if is_adamw:
        moments = {name: states & _ADAMW for name, states in keys.items() if states & _ADAMW}
        if odd := [name for name, states in moments.items() if states != _ADAMW]:
            raise checkpoint.damaged(f"{where}: of {', '.join(('step', *MOMENTS))} of '{odd[0]}' not all are there")
        if state.completed_steps and not moments:
            raise checkpoint.damaged(f"{where}: after {state.completed_steps} steps no weight has moments")
    names = {f"{name}.{key}" for name, states in keys.items() for key in states}
    if state.tensors not in (None, names_digest(names)):
        raise checkpoint.damaged(f"{where}: its {len(names)} tensors are not those that were saved")
    return names


def check_weights(checkpoint: Checkpoint, role: str, weights: Mapping[str, Tensor]) -> None:
    """Compare the saved weights with a model's: names, shapes, dtypes; and look for NaN."""
    where, names = f"{role}/weights", set[str]()
    for shard in _whole_tensors(checkpoint, where):
        weight = weights.get(shard.name)
        if weight is None or weight.shape != shard.global_shape:
            raise checkpoint.damaged(f"{where}: '{shard.name}' {shard.global_shape} is not of this model")
        if weight.dtype != shard.tensor.dtype:
            what = f"'{shard.name}' is {shard.tensor.dtype}, and in this model {weight.dtype}"
            raise checkpoint.damaged(f"{where}: {what}")
        names.add(shard.name)
    if missing := weights.keys() - names:
        raise checkpoint.damaged(f"{where}: '{min(missing)}' is missing")


def read_probe(checkpoint: Checkpoint) -> Probe:
    noted: Probe = checkpoint.json("actor/probe.json", Probe)
    if len(noted.outputs) != (1 if noted.head == "score" else len(_PROBE_TOKENS) - 2):
        raise checkpoint.damaged(f"actor/probe.json has {len(noted.outputs)} outputs")
    return noted


def probe(
    call: Callable[[Callable[[ActorWorker, Batch], Batch], Batch], Batch], model: Any, head: str
) -> dict[str, Any]:
    """Log-probs (or the score) of a few fixed tokens under the live weights, by a call of an actor's workers."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = [token % vocabulary for token in _PROBE_TOKENS]
    batch = Batch.from_columns({"prompt_tokens": [tokens[:2]], "response_tokens": [tokens[2:]]})
    dtype = str(getattr(model, "backbone", model).dtype).removeprefix("torch.")
    tolerance = {"float64": 1e-9, "float32": 1e-4}.get(dtype, 0.1)
    if head == "score":
        outputs = call(ActorWorker.scores, batch)["scores"]
    else:
        outputs = call(ActorWorker.log_probs, batch)["log_probs"][0]
    return {"dtype": dtype, "tolerance": tolerance, "head": head, "outputs": outputs}


def rng_state() -> tuple[dict[str, Tensor], RandomState]:
    """State of torch (CPU and every accelerator), NumPy's global generator and `random`."""
    version, words, gauss = random.getstate()
    kind, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        **{name: get() for name, (get, _) in device.generators().items()},
    }
    return tensors, RandomState(python=(version, gauss), numpy=(str(kind), int(pos), int(has_gauss), float(cached)))


def set_rng_state(tensors: Mapping[str, Tensor], meta: RandomState) -> None:
    """Set what `rng_state` gave. States of devices that this process lacks are left out.

    Raises:
        CheckpointError: the state is incomplete or of another kind of generator.
    """
    try:
        version, gauss = meta.python
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
        kind, pos, has_gauss, cached = meta.numpy
        np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), pos, has_gauss, cached))
        torch.set_rng_state(tensors["torch"].clone())
        for name, (_, put) in device.generators().items():
            if name in tensors:
                put(tensors[name].clone())
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the state of the random generators cannot be restored: {error}") from error
