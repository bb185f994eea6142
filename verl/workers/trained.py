"""What workers that train have in common: an engine over the ranks of the "train" mesh, and its weights and state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.device import put
from verl.layout import Mesh
from verl.models.packed import PackedModel
from verl.models.portable import PortableModel
from verl.shard import Shard
from verl.training.engine import TrainEngine
from verl.training.options import EngineOptions, Head
from verl.training.torch_engine import TorchEngine
from verl.workers.place import ALONE, Place, verb
from verl.workers.streams import equal_weights, gathered


def placed(model: PortableModel, place: Place) -> Any:
    """The live model on the device of `place`, with weights equal on all ranks of its role."""
    live = model.model if place.device is None else put(model.model, place.device)
    equal_weights(live, place)
    return live


def train_engine(
    model: Any, options: EngineOptions, head: Head, place: Place = ALONE, packed: PackedModel | None = None
) -> TrainEngine:
    """The engine of a rank of the "train" mesh; of a rank alone, where `place` is not part of it.

    Raises:
        ConfigError: the options cannot be met, see `TorchEngine`.
    """
    mesh = place.meshes.get("train", Mesh())
    group = place.groups.get("train") if "train" in place.meshes else None
    return TorchEngine(model, options, head=head, mesh=mesh, group=group, packed=packed)


class TrainedWorker:
    """Verbs that read an engine's weights and state.

    Attributes:
        engine: of this rank.
        place: where the worker stands.
    """

    engine: TrainEngine
    place: Place
    _state: list[Shard]

    @verb("train", collect="shards")
    def shards(self) -> Iterator[Shard]:
        """The trained weights, whole."""
        return gathered(self.engine.shards(), self.place.groups.get("train"))

    @verb("train")
    def meta(self) -> dict[str, Any]:
        """What `load_state` needs beside tensors, as JSON; `state` then gives the tensors of this moment."""
        self._state, meta = self.engine.state()
        return {**meta, **self.counts()}

    @verb("train", collect="shards")
    def state(self) -> Iterator[Shard]:
        """The optimizer's tensors, once after `meta`."""
        pieces, self._state = self._state, []
        return gathered(pieces, self.place.groups.get("train"))

    def counts(self) -> dict[str, int]:
        """The worker's own numbers, for `load_state`."""
        raise NotImplementedError
