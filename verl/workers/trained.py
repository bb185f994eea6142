"""What workers that train have in common: an engine over the ranks of the "train" mesh, and its weights and state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.device import put
from verl.layout import Mesh
from verl.models.packed import PackedModel
from verl.models.portable import PortableModel
from verl.shard import Shard
from verl.training.engine import TrainEngine
from verl.training.options import EngineOptions, Head
from verl.training.ranks import gather_json
from verl.training.torch_engine import TorchEngine
from verl.workers.place import ALONE, Place, verb
from verl.workers.saving import Pieces, RankFiles, merged
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
    return TorchEngine(model, options, head=head, mesh=mesh, group=group, parts=place.parts, packed=packed)


class TrainedWorker:
    """Verbs that read an engine's weights and state.

    Attributes:
        engine: of this rank.
        place: where the worker stands.
    """

    engine: TrainEngine
    place: Place
    _files: RankFiles | None = None

    @verb("train", collect="shards")
    def shards(self) -> Iterator[Shard]:
        """The trained weights, whole."""
        return gathered(self.engine.shards(), self.place.groups.get("train"))

    @verb("train")
    def save(self, folder: str, background: bool = False) -> dict[str, Any]:
        """Begin to write the weights and the optimizer's tensors into a directory that all ranks see, every rank its
        pieces; `saved` ends it.

        Args:
            background: copy the pieces to host memory, and write them while training goes on.

        Returns:
            What `load` needs beside the files, as JSON.
        """
        if self._files is not None:  # of a save that was given up
            self._files.gathered(wait=True)
        group = self.place.groups.get("train")
        state, meta = self.engine.state()
        parts: dict[str, Pieces] = {"weights": self.engine.shards, "optimizer": state.__iter__}
        self._files = RankFiles(Path(folder), parts, group, background=background)
        return {**merged(gather_json(meta, group)), **self.counts()}

    @verb("train")
    def saved(self, wait: bool = True) -> list[dict[str, Any]] | None:
        """What became of the files of the last `save`; see `RankFiles.gathered`."""
        found = None if self._files is None else self._files.gathered(wait)
        self._files = self._files if found is None else None
        return found

    def counts(self) -> dict[str, int]:
        """The worker's own numbers, for `load`."""
        raise NotImplementedError
