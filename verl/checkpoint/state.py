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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, Field, JsonValue, PositiveFloat, model_validator

from verl._base.durable import parse_json
from verl.batch import Batch
from verl.checkpoint.rng import RandomState, rng_state, set_rng_state
from verl.checkpoint.saving import SaveResult, TokenizerWriter, Writer
from verl.checkpoint.store import Checkpoint, VerifyReport, load_checkpoint, model_identity, save_checkpoint
from verl.checkpoint.store import verify as verify_files
from verl.cluster.controller import start
from verl.errors import CheckpointError, DamagedCheckpointError, DataError, ModelError
from verl.models.int4 import to_int4
from verl.models.lora import change_layers, layer_changes
from verl.models.source import ModelFiles
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.handle import check_base
from verl.training.optimizer import LIKE_THE_WEIGHT, MOMENTS, check_masters, check_optimizer, optimizer_name
from verl.weights.meta import on_meta, take_weights
from verl.weights.shard import names_digest
from verl.weights.shards import model_shards, outline
from verl.weights.tensor_files import is_finite
from verl.workers.actor import ActorWorker
from verl.workers.trained import TrainedWorker

if TYPE_CHECKING:
    from verl.data.prefetch import Loader
    from verl.trainer.trainer import Trainer


def _check_numbers(value: Any, where: str = "") -> Any:
    """Refuse numbers that are not finite at any depth: JSON's `1e999` is one, too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_numbers(item, f"{where}.{key}" if where else str(key))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} {value} is not a finite number".lstrip())
    return value


Count = Annotated[int, Field(ge=0, lt=2**53)]
#: What an object keeps in a form of its own.
Own = dict[str, Annotated[JsonValue, AfterValidator(_check_numbers)]]


class _Saved(BaseModel, extra="forbid", allow_inf_nan=False):
    """A part of a checkpoint's JSON: no unknown keys, and no numbers that are not finite."""


class SavedBase(_Saved):
    """What adapters were added to, where a checkpoint does not hold it; see `ModelHandle.save`."""

    path: str
    sha256: str


class RoleState(BaseModel, extra="allow", allow_inf_nan=False):
    """What a trained role keeps beside tensors."""

    __pydantic_extra__: Own

    completed_steps: Count
    optimizer: str = "AdamW"
    values: dict[str, Own] = {}
    groups: list[Own] = []
    loss_scale: PositiveFloat = 1.0
    steps_at_scale: Count = 0
    policy_version: Count = 0
    updates: Count = 0
    policy_id: str = ""
    base: SavedBase | None = None
    #: `names_digest` of the optimizer's tensors.
    tensors: str | None = None


class HeldOutRows(_Saved):
    """Which rows are evaluated."""

    rows: Count
    digest: str


class ResultState(_Saved):
    """The result of an evaluation; see `HeldOut`."""

    step: Count
    headline: str
    metrics: dict[str, float | None]
    problems: Count
    by_problem: list[float | None] = []
    low: float = 0.0
    high: float = 0.0


class EvaluationState(_Saved):
    """What `HeldOut` keeps: which rows, and the first and the latest result."""

    held_out: HeldOutRows
    first: ResultState | None
    last: ResultState | None

    @model_validator(mode="after")
    def _agree(self) -> EvaluationState:
        if (self.first is None) != (self.last is None):
            raise ValueError("of the first and the latest result one is missing")
        if self.first is not None and self.last is not None:
            if not {self.first.headline, self.last.headline} <= self.first.metrics.keys() & self.last.metrics.keys():
                raise ValueError("a headline has no metric")
            if len(self.first.by_problem) != len(self.last.by_problem):
                raise ValueError("the results are of another number of problems")
        return self


class TaskState(_Saved):
    """What a task keeps."""

    algorithm: Own
    sources: dict[str, Own]


class TrainerState(_Saved):
    """`trainer.json`: the schema that every save and every load passes."""

    steps: Count
    skipped: Count
    tasks: dict[str, TaskState]
    roles: dict[str, RoleState]
    random: RandomState
    updates: Count
    idle: Count
    position: Own | None
    evaluation: EvaluationState | None
    guards: list[Own] = []
    mixture: Own = {}


class SavedAdapters(_Saved):
    """Adapters as peft describes them."""

    name: str
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    config: Own


class SavedLayers(_Saved):
    """`actor/layers.json`: see `verl.models.lora.layer_changes`."""

    int4: list[str]
    adapters: SavedAdapters | None


class _Probe(BaseModel, allow_inf_nan=False):
    """`actor/probe.json`."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    tolerance: PositiveFloat
    head: Literal["lm", "value", "score"]
    outputs: list[float]


_PROBE_TOKENS = [1, 5, 3, 8, 2, 13, 7, 21]
#: Columns of samples that wait for an update, and those that have a number a token.
_SAMPLE = ("group", "prompt_tokens", "response_tokens")
_BY_TOKEN = ("response_mask", "rollout_log_probs", "log_probs", "ref_log_probs", "values")
_REQUIRED = ("trainer.json", "buffer.parquet", "random", "actor/config.json", "actor/probe.json")
_MOMENTS = ("step", *MOMENTS)
#: The attributes of a trainer that `TrainerState` holds as they are.
_OWN = ("steps", "skipped", "updates", "idle", "position")


def save(trainer: Trainer, path: Path) -> SaveResult:
    """Write a checkpoint."""
    start()
    return save_checkpoint(path, trainer.steps, *contents(trainer))


def load(trainer: Trainer, path: Path) -> None:
    """Check a checkpoint, then restore it."""
    start()
    # A run of `verl train` records its settings, which a trainer outside of one does not have.
    checkpoint = load_checkpoint(path, identity(trainer), unknown=() if trainer.settings else ("settings",))
    check(trainer, checkpoint)
    restore(trainer, checkpoint)


def identity(trainer: Trainer) -> dict[str, str]:
    """What a checkpoint must have in common with the trainer that loads it."""
    parts = {}
    for name, task in trainer.tasks.items():
        key = "algorithm" if len(trainer.tasks) == 1 else f"task.{name}.algorithm"
        parts[key] = task.algorithm.name or type(task.algorithm).__name__
    for role, handle in trainer.roles.items():
        architecture = type(getattr(handle.modules, "backbone", handle.modules)).__name__
        parts |= model_identity(role, architecture, handle.outline)
    if digest := trainer.actor.reference_digest:
        parts["reference.sha256"] = digest
    if trainer.settings is not None:
        parts["settings"] = trainer.settings
    return parts


def contents(trainer: Trainer, *, background: bool = False) -> tuple[dict[str, Any], dict[str, str], list[Writer]]:
    """What `save_checkpoint` writes: files, the identity, and the writers of the roles and of the tokenizer.

    Args:
        background: the tensors are copied to host memory and written while training goes on.
    """
    writers = [RoleWriter(role, handle, background) for role, handle in trainer.roles.items()]
    random_tensors, random_meta = rng_state()
    files = {
        "actor/config.json": trainer.actor.modules.config.to_dict(),
        "actor/probe.json": _probe(trainer.actor.group.call, trainer.actor.modules, trainer.actor.head),
        "buffer.parquet": trainer.buffer.state(),
        "random": random_tensors,
        "trainer.json": lambda: _state(trainer, {writer.role: writer.meta for writer in writers}, random_meta),
        **trainer.extra_files(),
    }
    if any((layers := layer_changes(trainer.actor.modules)).values()):
        files["actor/layers.json"] = layers
    return files, identity(trainer), [*writers, TokenizerWriter(trainer.actor.tokenizer_as_trained)]


class RoleWriter:
    """The ranks of a role as writers of a checkpoint; see `Writer`.

    Attributes:
        meta: what the role keeps beside tensors, once it has begun.
    """

    def __init__(self, role: str, handle: Actor | Critic, background: bool) -> None:
        self.role, self._handle, self._background = role, handle, background
        self.meta: dict[str, Any] = {}
        self._files: dict[str, Any] | None = None

    def begin(self, folder: Path) -> None:
        (folder / self.role).mkdir(exist_ok=True)
        self.meta = self._handle.save(str(folder / self.role), self._background)

    def end(self, wait: bool) -> dict[str, Any] | None:
        if self._files is None:
            reports = self._handle.group.call(TrainedWorker.saved, wait)
            if reports is None:
                return None
            for rank in reports:
                if "errno" in rank:
                    raise OSError(rank["errno"], rank["error"], rank["file"])
                if "error" in rank:
                    raise CheckpointError(rank["error"])
            files = {name: entry for rank in reports for name, entry in rank["files"].items()}
            self._files = {f"{self.role}/{name}": entry for name, entry in files.items()}
        return self._files


def _state(trainer: Trainer, roles: Mapping[str, Any], random: RandomState) -> dict[str, Any]:
    """`trainer.json`."""
    state = {name: getattr(trainer, name) for name in _OWN} | {
        "tasks": {
            name: {
                "algorithm": task.algorithm.state_dict(),
                "sources": {role: source.state_dict() for role, source in task.sources.items()},
            }
            for name, task in trainer.tasks.items()
        },
        "roles": dict(roles),
        "random": random.model_dump(),
        "evaluation": None if trainer.held_out is None else trainer.held_out.state_dict(),
        "guards": [] if trainer.guards is None else trainer.guards.state_dict(),
        "mixture": trainer.mixture.state_dict(),
    }
    try:
        parse_json(json.dumps(state).encode(), TrainerState)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    return state


def check(trainer: Trainer, checkpoint: Checkpoint, data: Loader | None = None) -> TrainerState:
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
    state = _read_state(checkpoint)
    if state.roles.keys() != roles.keys():
        raise checkpoint.damaged(f"trainer.json has the roles {sorted(state.roles)}, not {sorted(roles)}")
    for role, handle in roles.items():
        _check_role(checkpoint, role, handle, state.roles[role])
    _read_probe(checkpoint)
    checkpoint.json("actor/config.json", dict[str, Any])
    _check_buffer(checkpoint)
    _check_random(checkpoint, state)
    if state.tasks.keys() != trainer.tasks.keys():
        raise CheckpointError(
            f"{checkpoint.path} is of the tasks {', '.join(state.tasks)}, and these are {', '.join(trainer.tasks)}"
        )
    for name, holder, saved in _holders(trainer, state):
        _try_state(checkpoint, name, holder, saved)
    if data is not None and state.position is not None:
        _try_state(checkpoint, "the data", data, state.position)
    try:
        trainer.check_extra_files(checkpoint)
    except DataError as error:
        raise checkpoint.damaged(str(error)) from None
    if trainer.held_out is not None and state.evaluation is not None:
        trainer.held_out.check(state.evaluation.held_out.model_dump())
    return state


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restore the trainer from a checkpoint that has passed `check`."""
    state = _read_state(checkpoint)
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
    trainer.load_extra_files(checkpoint)
    set_rng_state(checkpoint.tensors("random"), state.random)


def _holders(trainer: Trainer, state: TrainerState) -> Iterator[tuple[str, Any, Any]]:
    """What keeps a state in a form of its own: its name in messages, the object, and the state that was saved."""
    for name, task in trainer.tasks.items():
        yield "algorithm", task.algorithm, state.tasks[name].algorithm
        for role, source in task.sources.items():
            yield role, source, state.tasks[name].sources.get(role, {})
    yield "the task scheduler", trainer.mixture, state.mixture
    if trainer.guards is not None:
        yield "the guards", trainer.guards, state.guards


def _read_state(checkpoint: Checkpoint) -> TrainerState:
    state: TrainerState = checkpoint.json("trainer.json", TrainerState)
    if state.steps != checkpoint.step:
        raise checkpoint.damaged(f"trainer.json says step {state.steps}, the manifest {checkpoint.step}")
    return state


def _check_role(checkpoint: Checkpoint, role: str, handle: Actor | Critic, state: RoleState) -> None:
    options = handle.train_options
    check_optimizer(optimizer_name(options.optimizer), state.model_dump(exclude_unset=True))
    weights = handle.outline
    names = _check_moments(checkpoint, role, weights, state, is_adamw=options.optimizer is None)
    if options.optimizer is None:  # which weights a caller's own trains, it alone knows
        check_masters({name: weight for name, weight in weights.items() if weight.requires_grad}, names)
    if state.base is not None:
        check_base(state.base.model_dump(), handle.base)
        weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
    _check_weights(checkpoint, role, weights)


def _check_buffer(checkpoint: Checkpoint) -> None:
    """Samples that wait have what every update reads, and numbers for each of their tokens."""
    samples = checkpoint.batch("buffer.parquet")
    if len(samples) and (lacking := [name for name in _SAMPLE if name not in samples]):
        raise checkpoint.damaged(f"buffer.parquet: its samples lack {', '.join(lacking)}")
    for name in (name for name in _BY_TOKEN if name in samples):
        written = samples.arrow(name).is_valid().to_pylist()
        pairs = zip(samples.lengths(name), samples.lengths("response_tokens"), written, strict=True)
        if any(here != tokens for here, tokens, is_there in pairs if is_there):
            raise checkpoint.damaged(f"buffer.parquet: {name} is not as long as response_tokens")


def _check_random(checkpoint: Checkpoint, state: TrainerState) -> None:
    before = rng_state()
    try:
        set_rng_state(checkpoint.tensors("random"), state.random)
    except CheckpointError as error:
        raise checkpoint.damaged(f"random: {error}") from None
    finally:
        set_rng_state(*before)


def _check_moments(
    checkpoint: Checkpoint, role: str, weights: Mapping[str, torch.Tensor], state: RoleState, *, is_adamw: bool
) -> set[str]:
    """Look through an optimizer's tensors: whole, of this model, finite, and all that there were; returns their names.

    Args:
        is_adamw: it is ours, of whose tensors more is known.
    """
    lacking: dict[str, int] = {}
    for shard in checkpoint.shards(f"{role}/optimizer"):
        name, _, key = shard.name.rpartition(".")
        shape = tuple(weights[name].shape) if name in weights else None
        fits = shape is not None and (key not in LIKE_THE_WEIGHT or shard.global_shape == shape)
        if fits and is_adamw:
            fits = key in (*LIKE_THE_WEIGHT, "step") and _is_possible(key, shard.tensor, state.completed_steps)
        if not fits or not is_finite(shard.tensor) or not shard.tensor.is_floating_point():
            raise checkpoint.damaged(f"{role}/optimizer: '{shard.name}' is not finite, or not of this model")
        lacking.setdefault(shard.name, math.prod(shard.global_shape))
        lacking[shard.name] -= shard.tensor.numel()
    if cut := [name for name, count in lacking.items() if count]:
        raise checkpoint.damaged(f"{role}/optimizer: '{cut[0]}' is incomplete")
    if is_adamw:
        moments = Counter(name for name, _, key in (n.rpartition(".") for n in lacking) if key in _MOMENTS)
        if odd := [name for name, count in moments.items() if count < len(_MOMENTS)]:
            raise checkpoint.damaged(f"{role}/optimizer: of {', '.join(_MOMENTS)} of '{odd[0]}' not all are there")
        if state.completed_steps and not moments:
            raise checkpoint.damaged(f"{role}/optimizer: after {state.completed_steps} steps no weight has moments")
    if state.tensors not in (None, names_digest(lacking)):
        raise checkpoint.damaged(f"{role}/optimizer: its {len(lacking)} tensors are not those that were saved")
    return {*lacking}


def _is_possible(key: str, tensor: torch.Tensor, steps: int) -> bool:
    """Whether AdamW can have come to such a state in so many steps."""
    if key == "step":
        return tensor.numel() == 1 and float(tensor) in range(steps + 1)
    return key != "exp_avg_sq" or not tensor.numel() or bool(tensor.min() >= 0)


def _check_weights(checkpoint: Checkpoint, role: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Compare the saved weights with a model's: names, shapes, dtypes; and look for NaN."""
    saved = dict.fromkeys(weights, 0)
    for shard in checkpoint.shards(f"{role}/weights"):
        weight = weights.get(shard.name)
        if weight is None or tuple(weight.shape) != shard.global_shape:
            raise checkpoint.damaged(f"{role}/weights: '{shard.name}' {shard.global_shape} is not of this model")
        if weight.dtype != shard.tensor.dtype:
            what = f"'{shard.name}' is {shard.tensor.dtype}, and in this model {weight.dtype}"
            raise checkpoint.damaged(f"{role}/weights: {what}")
        if not is_finite(shard.tensor):
            raise checkpoint.damaged(f"{role}/weights: '{shard.name}' has values that are not finite")
        saved[shard.name] += shard.tensor.numel()
    if short := [name for name, count in saved.items() if count != weights[name].numel()]:
        raise checkpoint.damaged(f"{role}/weights: '{short[0]}' is incomplete or missing")


def _try_state(checkpoint: Checkpoint, name: str, holder: Any, state: Any) -> None:
    """Load a state into an object to see that it is accepted, then restore the object's own."""
    before = holder.state_dict()
    try:
        holder.load_state_dict(state)
    except DamagedCheckpointError as error:
        raise checkpoint.damaged(f"trainer.json: the state of {name}: {error}") from None
    except CheckpointError:
        raise
    except Exception as error:  # of whatever algorithm, reward or data the user has
        if name == "the data" and isinstance(error, DataError):
            raise
        raise checkpoint.damaged(f"trainer.json: the state of {name}: {type(error).__name__}: {error}") from None
    finally:
        holder.load_state_dict(before)


def verify(path: str | Path) -> VerifyReport:
    """Check a checkpoint through: digests, tensors, and the reloaded actor's forward pass against the one noted when
    it was saved."""
    report = verify_files(path)
    if not report.ok:
        return report
    checkpoint = load_checkpoint(path)
    if "actor/probe.json" not in checkpoint:
        return report
    try:
        state = _read_state(checkpoint)
        _check_random(checkpoint, state)
        for role, saved in state.roles.items():
            shapes = {s.name: torch.empty(s.global_shape, device="meta") for s in checkpoint.shards(f"{role}/weights")}
            is_ours = saved.optimizer == "AdamW" and not saved.groups
            _check_moments(checkpoint, role, shapes, saved, is_adamw=is_ours)
        _, fault = rebuild(checkpoint)
    except DamagedCheckpointError as error:
        fault = str(error)
    if fault is not None:
        report.problems.append(fault)
    return report


def rebuild(checkpoint: Checkpoint) -> tuple[Any, str | None]:
    """The actor's model, made anew from a checkpoint, and what is wrong with it: None if its outputs are those noted
    when it was saved.

    Raises:
        CheckpointError: the checkpoint holds no actor, or one that cannot be made anew here.
    """
    from verl.models.portable import PortableModel
    from verl.rollout.options import SamplerOptions
    from verl.training.options import EngineOptions

    noted = _read_probe(checkpoint)
    base = _read_state(checkpoint).roles["actor"].base if "trainer.json" in checkpoint else None
    model = _on_base(checkpoint, noted, base) if base is not None else _from_config(checkpoint, noted)
    weights = outline(model)
    if base is not None:
        weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
    _check_weights(checkpoint, "actor", weights)
    beside = (shard for shard in model_shards(model) if shard.name not in weights)
    take_weights(model, chain(beside, checkpoint.shards("actor/weights")))
    worker = ActorWorker(PortableModel(model), None, (), EngineOptions(), SamplerOptions(), head=noted.head)
    probe = _probe(lambda method, batch: method(worker, batch), model, noted.head)
    gap = max(abs(a - b) for a, b in zip(probe["outputs"], noted.outputs, strict=True))
    if gap <= noted.tolerance:
        return model, None
    return model, f"the reloaded actor's outputs differ by {gap:.3g} from those noted at the save"


def _from_config(checkpoint: Checkpoint, noted: _Probe) -> Any:
    """The model that a checkpoint holds whole, without weights (`verl.weights.meta`)."""
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
        bias = [s.tensor for s in checkpoint.shards("actor/weights") if s.name == "score.bias"]
        backbone = ValueModel.from_model(model).backbone
        weight = torch.zeros(1, width_of(backbone))
        model = ValueModel(backbone, (weight, torch.zeros(1) if bias else None)).eval()
    if "actor/layers.json" in checkpoint:
        change_layers(model, checkpoint.json("actor/layers.json", SavedLayers).model_dump())
    return model


def _on_base(checkpoint: Checkpoint, noted: _Probe, base: SavedBase) -> Any:
    """The model of a checkpoint of adapters alone, over its base; the adapters are still to come.

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


def _read_probe(checkpoint: Checkpoint) -> _Probe:
    probe: _Probe = checkpoint.json("actor/probe.json", _Probe)
    if len(probe.outputs) != (1 if probe.head == "score" else len(_PROBE_TOKENS) - 2):
        raise checkpoint.damaged(f"actor/probe.json has {len(probe.outputs)} outputs")
    return probe


def _probe(
    call: Callable[[Callable[[ActorWorker, Batch], Batch], Batch], Batch], model: Any, head: str
) -> dict[str, Any]:
    """Log-probs (or the score) of a few fixed tokens under the live weights, by a call of an actor's workers."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = [token % vocabulary for token in _PROBE_TOKENS]
    batch = Batch.from_columns({"prompt_tokens": [tokens[:2]], "response_tokens": [tokens[2:]]})
    backbone = getattr(model, "backbone", model)
    dtype = str(backbone.dtype).removeprefix("torch.")
    tolerance = {"float64": 1e-9, "float32": 1e-4}.get(dtype, 0.1)
    if head == "score":
        outputs = call(ActorWorker.scores, batch)["scores"]
    else:
        outputs = call(ActorWorker.log_probs, batch)["log_probs"][0]
    return {"dtype": dtype, "tolerance": tolerance, "head": head, "outputs": outputs}
