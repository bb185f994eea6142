"""The base of workers that train: an engine over the ranks of the "train" mesh, and its weights and state."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from verl._host.device import peak_memory, put
from verl.cluster.rank_context import ALONE, RankContext, dispatch
from verl.errors import ModelError
from verl.models.packed import PackedModel
from verl.models.portable import PortableModel
from verl.models.source import ModelFiles, ModelSource
from verl.training.engine import TrainEngine, WeightSource
from verl.training.options import EngineOptions, Head
from verl.training.ranks import gather_json
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Mesh
from verl.weights.shard import Shard, Stream, names_digest
from verl.weights.shards import load_model_shards, model_shards
from verl.weights.tensor_files import read_shards
from verl.workers.saving import RankFiles
from verl.workers.streams import gathered, spread

logger = logging.getLogger(__name__)


def model_of_rank(source: ModelSource, context: RankContext) -> tuple[Any, WeightSource | None]:
    """The model of a source for this rank.

    Returns:
        The live model on the device of `context`, with weights equal on all ranks of its role; or, where ranks share a
        model that each can read in part, one without weights, and where they come from.
    """
    if isinstance(source, ModelFiles):
        layout = context.meshes.get("train", Mesh()).layout
        if not context.is_apart and not layout.is_plain:
            model = source.on_meta(context.device or "cpu")
            try:
                return model, source.by_parts(model)
            except ModelError as reason:
                logger.info(
                    "%s: every rank reads all of %s before it keeps its part: %s", context.role, source.path, reason
                )
        source = PortableModel(source.load())
    live = source.model if context.device is None else put(source.model, context.device)
    if context.size > 1:  # a model that each rank has made for itself may differ: all get the first trainer's weights
        first = Stream(lambda: model_shards(live)) if context.rank == context.trainer else None
        spread(first, context, partial(load_model_shards, live))
    return live, None


def train_engine(
    model: Any,
    options: EngineOptions,
    head: Head,
    context: RankContext = ALONE,
    packed: PackedModel | None = None,
    weights: WeightSource | None = None,
) -> TrainEngine:
    """The engine of a rank of the "train" mesh; of a rank alone, where `context` is not part of it.

    Raises:
        ConfigError: the options cannot be met, see `TorchEngine`, `DeepSpeedEngine` and `MegatronEngine`.
    """
    mesh = context.meshes.get("train", Mesh())
    group = context.groups.get("train") if "train" in context.meshes else None
    make: type[TrainEngine] = TorchEngine
    back_ends = mesh.layout.asked(options.back_end)
    if "ZeRO" in back_ends:
        from verl.training.backends.deepspeed import DeepSpeedEngine

        make = DeepSpeedEngine
    elif "Megatron" in back_ends:
        from verl.training.backends.megatron import MegatronEngine

        make = MegatronEngine
    engine = make(
        model, options, head=head, mesh=mesh, group=group, parts=context.parts, packed=packed, weights=weights,
        device=context.device,
    )  # fmt: skip
    if context.role:
        logger.info("%s: %s", context.role, summary(engine, options, context))
    return engine


def summary(engine: TrainEngine, options: EngineOptions, context: RankContext) -> str:
    """A model's parameters, strategy and sharding, and this rank's share by device, for the log."""
    specs, layout = [*engine.weights.specs.values()], engine.mesh.layout
    here = Counter[str]()
    for shard in engine.shards():
        here[str(shard.tensor.device)] += shard.tensor.numel()
    cuts = Counter(
        " and ".join(f"{dim} along {'all' if axis is None else axis}" for dim, axis, _ in spec.sharded_dims) or "whole"
        for spec in specs
    )
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})
    parts = [
        f"{sum(math.prod(spec.shape) for spec in specs):,} parameters in {'/'.join(dtypes)}",
        f"strategy {options.strategy if layout.size > 1 else 'single'} {layout.shown}",
        f"weights {', '.join(f'{count} {cut}' for cut, count in cuts.items())}",
        f"rank {context.rank} of {context.size} holds {', '.join(f'{n:,} on {device}' for device, n in here.items())}",
    ]
    return "; ".join(parts)


class TrainedWorker:
    """Calls that read an engine's weights and state.

    Attributes:
        engine: of this rank.
        context: the worker's rank and process groups.
        counter: the attribute that counts updates.
    """

    counter: ClassVar[str]
    engine: TrainEngine
    context: RankContext
    _files: RankFiles | None = None

    @dispatch("train", collect="shards")
    def shards(self) -> Iterator[Shard]:
        """The trained weights, whole."""
        return gathered(Stream(self.engine.shards), self.context.groups.get("train"))

    @dispatch("train")
    def save(self, folder: str, background: bool = False, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Begin to write the weights and the optimizer's tensors into a directory that all ranks see, every rank its
        shards; `saved` ends it.

        Args:
            background: copy the shards to host memory, and write them while training goes on.
            names: of the weights; None: all.

        Returns:
            Metadata for `load`, as JSON.
        """
        if self._files is not None:  # of a save that was given up
            self._files.gathered(wait=True)
        group = self.context.groups.get("train")
        state, meta = self.engine.state()
        chosen = None if names is None else {*names}
        weights = Stream(lambda: (s for s in self.engine.shards() if chosen is None or s.name in chosen))
        parts = {"weights": weights, "optimizer": state}
        self._files = RankFiles(Path(folder), parts, group, background=background)
        metas = gather_json(meta, group)
        if "values" in meta:  # each rank has the optimizer's values for its own weights
            metas[0]["values"] = {name: value for one in metas for name, value in one["values"].items()}
        held = names_digest(self._files.names["optimizer"])
        return {**metas[0], "tensors": held, self.counter: getattr(self, self.counter)}

    @dispatch("train")
    def saved(self, wait: bool = True) -> list[dict[str, Any]] | None:
        """The results of the last `save`; see `RankFiles.gathered`."""
        results = None if self._files is None else self._files.gathered(wait)
        self._files = self._files if results is None else None
        return results

    @dispatch("train")
    def peak_memory(self) -> int:
        """Peak device memory of a rank so far, in bytes; on CPU, of its process."""
        where = self.context.device or next(shard.tensor.device for shard in self.engine.shards())
        here = peak_memory(where)
        return int(max(gather_json(here, self.context.groups.get("train"))))

    @dispatch(collect="none")
    def load_shards(self, shards: Iterable[Shard]) -> None:
        self.engine.load_shards(shards)
        self._sync_weights()

    @dispatch(collect="none")
    def load(
        self,
        weights: Sequence[str],
        optimizer: Sequence[str],
        meta: Mapping[str, Any],
        names: Sequence[str] | None = None,
    ) -> None:
        """Restore what `save` wrote, at any layout: every rank reads its shards from the files.

        Args:
            names: of the weights that `save` wrote, if it left out a base; other weights stay as they are.
        """
        rest = dict(meta)
        setattr(self, self.counter, int(rest.pop(self.counter)))
        saved = read_shards(map(Path, weights))
        if names is not None:
            here = {*names}
            saved = chain((s for s in self.engine.shards() if s.name not in here), saved)
        self.engine.load_shards(saved)
        if "train" in self.context.meshes:
            self.engine.load_state(read_shards(map(Path, optimizer)), rest)
        self._sync_weights()

    def _sync_weights(self) -> dict[str, float]:
        """Hook for subclasses: sync the new weights to a rollout engine; returns its metrics."""
        return {}
