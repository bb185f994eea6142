"""The critic on one rank: it predicts values and learns them."""

from __future__ import annotations

from collections.abc import Sequence

from verl.batch import Batch
from verl.cluster.rank_context import ALONE, RankContext, dispatch
from verl.models.source import ModelSource
from verl.training.options import EngineOptions
from verl.workers.trained import TrainedWorker, model_of_rank, train_engine
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates


class CriticWorker(TrainedWorker):
    """A value model and its optimizer; `updates` counts its updates."""

    counter = "updates"

    def __init__(self, model: ModelSource, train: EngineOptions, *, context: RankContext = ALONE) -> None:
        self.context = context
        live, weights = model_of_rank(model, context)
        self.engine = train_engine(live, train, "value", context, weights=weights)
        self.updates = 0

    @dispatch("train", split="rows", collect="rows")
    def values(self, batch: Batch) -> Batch:
        """Column `values`: the value of the state before each response token."""
        values = self.engine.predict(batch, ("values",))["values"]
        return Batch.from_columns({"values": (values, batch.lengths("response_tokens"))})

    @dispatch("train")
    def update(self, parts: Sequence[TaskLoss], plan: MiniBatchPlan) -> dict[str, float]:
        metrics = run_updates(self.engine, parts, plan, self.updates)
        self.updates += 1
        return metrics
