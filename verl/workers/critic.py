"""The critic on one rank: it predicts values and learns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.batch import Batch
from verl.models.source import ModelSource
from verl.shard import Shard
from verl.tensor_files import read_shards
from verl.training.options import EngineOptions
from verl.workers.place import ALONE, Place, dispatch
from verl.workers.trained import TrainedWorker, placed, train_engine
from verl.workers.update import UpdatePart, UpdatePlan, run_updates


class CriticWorker(TrainedWorker):
    """A value model and its optimizer; `updates` counts its updates."""

    def __init__(self, model: ModelSource, train: EngineOptions, *, place: Place = ALONE) -> None:
        self.place = place
        live, weights = placed(model, place)
        self.engine = train_engine(live, train, "value", place, weights=weights)
        self.updates = 0

    @dispatch("train", split="rows", collect="rows")
    def values(self, batch: Batch) -> Batch:
        """Column `values`: the value of the state before each response token."""
        values = self.engine.predict(batch, ("values",))["values"]
        return Batch.from_columns({"values": (values, batch.lengths("response_tokens"))})

    @dispatch("train")
    def update(self, parts: Sequence[UpdatePart], plan: UpdatePlan) -> dict[str, float]:
        metrics = run_updates(self.engine, parts, plan, self.updates)
        self.updates += 1
        return metrics

    @dispatch("train", collect="none")
    def load_shards(self, shards: Iterable[Shard]) -> None:
        self.engine.load_shards(shards)

    def counts(self) -> dict[str, int]:
        return {"updates": self.updates}

    @dispatch("train", collect="none")
    def load(
        self,
        weights: Sequence[str],
        optimizer: Sequence[str],
        meta: Mapping[str, Any],
        names: Sequence[str] | None = None,
    ) -> None:
        """Go on from what `save` wrote, at any layout: every rank reads its pieces out of the files."""
        rest = dict(meta)
        self.updates = int(rest.pop("updates"))
        self.load_weights(weights, names)
        self.engine.load_state(read_shards(map(Path, optimizer)), rest)
