"""The JSON files of a checkpoint: what every save and every load is checked against."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, JsonValue, PositiveFloat, model_validator


def _check_numbers(value: Any, where: str = "") -> Any:
    """Refuse numbers that are not finite at any depth: JSON's `1e999` is one, too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_numbers(item, f"{where}.{key}" if where else str(key))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} {value} is not a finite number".lstrip())
    return value


Count = Annotated[int, Field(ge=0, lt=2**53)]
#: What an object's `state_dict` returns; only the object knows its keys.
Own = dict[str, Annotated[JsonValue, AfterValidator(_check_numbers)]]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]


class Saved(BaseModel, extra="forbid", allow_inf_nan=False):
    """A part of a checkpoint's JSON: no unknown keys, and no numbers that are not finite."""


class SavedBase(Saved):
    """The base model of adapters, where a checkpoint does not hold it; see `ModelHandle.save`."""

    path: str
    sha256: str


class RoleState(BaseModel, extra="allow", allow_inf_nan=False):
    """The state of a trained role besides its tensors."""

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


class RandomState(BaseModel, allow_inf_nan=False):
    """The state of the generators that is not in tensors."""

    python: tuple[int, float | None]
    #: NumPy's own check lets through a position that it then reads at.
    numpy: tuple[str, Annotated[int, Field(ge=0, le=624)], Annotated[int, Field(ge=0, le=1)], float]


class HeldOutRows(Saved):
    """Which rows are evaluated."""

    rows: Count
    digest: str


class ResultState(Saved):
    """The result of an evaluation; see `HeldOut`."""

    step: Count
    headline: str
    metrics: dict[str, float | None]
    problems: Count
    by_problem: list[float | None] = []
    low: float = 0.0
    high: float = 0.0


class EvaluationState(Saved):
    """The state of `HeldOut`: which rows, and the first and the latest result."""

    held_out: HeldOutRows
    first: ResultState | None
    last: ResultState | None

    @model_validator(mode="after")
    def _agree(self) -> EvaluationState:
        first, last = self.first, self.last
        if first is None or last is None:
            if first is not last:
                raise ValueError("of the first and the latest result one is missing")
        elif not {first.headline, last.headline} <= first.metrics.keys() & last.metrics.keys():
            raise ValueError("a headline has no metric")
        elif len(first.by_problem) != len(last.by_problem):
            raise ValueError("the results are of another number of problems")
        return self


class TaskState(Saved):
    """The state of a task."""

    algorithm: Own
    sources: dict[str, Own]


class TrainerState(Saved):
    """`trainer.json`."""

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


class SavedAdapters(Saved):
    """Adapters as peft describes them."""

    name: str
    dtype: Dtype
    config: Own


class SavedLayers(Saved):
    """`actor/layers.json`: see `verl.models.lora.layer_changes`."""

    int4: list[str]
    adapters: SavedAdapters | None


class Probe(BaseModel, allow_inf_nan=False):
    """`actor/probe.json`: the model's outputs for a few fixed tokens when it was saved."""

    dtype: Dtype
    tolerance: PositiveFloat
    head: Literal["lm", "value", "score"]
    outputs: list[float]
