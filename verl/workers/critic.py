"""The critic on one rank: it predicts values and learns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from verl.batch import Batch
from verl.device import put
from verl.models.portable import PortableModel
from verl.models.shards import whole
from verl.shard import Shard
from verl.training.options import EngineOptions
from verl.workers.actor import make_engine
from verl.workers.place import ALONE, Place, verb
from verl.workers.streams import spread_weights
from verl.workers.update import Objective, UpdatePlan, run_updates


class CriticWorker:
    """A value model and its optimizer; `updates` counts its updates."""

    def __init__(self, model: PortableModel, train: EngineOptions, *, place: Place = ALONE) -> None:
        live = model.model if place.device is None else put(model.model, place.device)
        self.engine = make_engine(train, live, "value", place.groups.get("train"))
        if place.size > 1:
            spread_weights(self.engine, place, to_all=True)
        self.updates = 0
        self._tensors: dict[str, torch.Tensor] = {}

    @verb("train", split="rows", collect="rows")
    def values(self, batch: Batch) -> Batch:
        """Column `values`: the value of the state before each response token."""
        return Batch.from_columns({"values": (self.engine.values(batch), batch.lengths("response_tokens"))})

    @verb("train")
    def update(self, batch: Batch, objective: Objective, plan: UpdatePlan) -> dict[str, float]:
        metrics = run_updates(self.engine, batch, objective, plan, self.updates)
        self.updates += 1
        return metrics

    @verb("train", collect="shards")
    def shards(self) -> Iterator[Shard]:
        return self.engine.shards()

    @verb("train", collect="none")
    def load_shards(self, shards: Iterable[Shard]) -> None:
        self.engine.load_shards(shards)

    @verb("train")
    def meta(self) -> dict[str, Any]:
        """What `load_state` needs beside tensors, as JSON; `state` then gives the tensors of this moment."""
        self._tensors, meta = self.engine.state()
        return {**meta, "updates": self.updates}

    @verb("train", collect="shards")
    def state(self) -> Iterator[Shard]:
        """The optimizer's tensors, once after `meta`."""
        tensors, self._tensors = self._tensors, {}
        return (Shard.whole(name, whole(tensor)) for name, tensor in tensors.items())

    @verb("train", collect="none")
    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        rest = dict(meta)
        self.updates = int(rest.pop("updates"))
        self.engine.load_state(tensors, rest)
