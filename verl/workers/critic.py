"""The critic on one rank: it predicts values and learns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from verl.batch import Batch
from verl.shard import Shard
from verl.workers.actor import TrainOptions
from verl.workers.update import Objective, UpdatePlan, run_updates


class CriticWorker:
    """A value model and its optimizer; `updates` counts its updates."""

    def __init__(self, model: Any, train: TrainOptions) -> None:
        self.engine = train.engine(model, head="value")
        self.updates = 0

    def values(self, batch: Batch) -> Batch:
        """Column `values`: the value of the state before each response token."""
        return Batch.from_columns({"values": (self.engine.values(batch), batch.lengths("response_tokens"))})

    def update(self, batch: Batch, objective: Objective, plan: UpdatePlan) -> dict[str, float]:
        metrics = run_updates(self.engine, batch, objective, plan, self.updates)
        self.updates += 1
        return metrics

    def shards(self) -> Iterator[Shard]:
        return self.engine.shards()

    def load_shards(self, shards: Iterable[Shard]) -> None:
        self.engine.load_shards(shards)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, meta = self.engine.state()
        return tensors, {**meta, "updates": self.updates}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        rest = dict(meta)
        self.updates = int(rest.pop("updates"))
        self.engine.load_state(tensors, rest)
