"""The actor's model in the layout of generation, where that is another one than the layout of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.cluster.rank_context import WEIGHTS, RankContext
from verl.models.packed import PackedModel
from verl.models.portable import empty_copy
from verl.training.engine import TrainEngine
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import generation_mesh
from verl.weights.shards import give_memory, named_weights
from verl.weights.transition import HybridWeights


class GenerationModel:
    """Memory of its own for the parts of the weights that this rank generates with: filled from the trained weights
    before a rollout, and freed after it. All ranks that share the trained model call each method together.

    Args:
        meta_model: the model without weights.
        options: of the trained model.
        context: the worker's rank and process groups.
        trained: the engine of the trained model. It cannot train while the generation weights are in memory: they
            replace its shards.
        whole: each rank has the whole model, whatever the mesh "rollout" says.

    Attributes:
        packed: the model as engines call it. Its weights are there inside `filled`.
        weights: what moves them.
    """

    def __init__(
        self,
        meta_model: Any,
        options: EngineOptions,
        context: RankContext,
        trained: TrainEngine,
        *,
        whole: bool = False,
    ) -> None:
        mesh = generation_mesh(trained.mesh) if whole else context.meshes["rollout"]
        frozen, device = options.generating(mesh.layout), context.device or "cpu"
        is_cut = mesh.layout.tp > 1
        model = empty_copy(meta_model, "meta" if is_cut else device)
        if is_cut:
            self.packed = PackedModel(model, fused_kernels=options.fused_kernels, device=device)
            group = context.groups.get("rollout")
            self._engine = TorchEngine(
                model, frozen, mesh=mesh, group=group, parts=context.parts, packed=self.packed, device=device
            )
            give_memory(model, device)
        targets = dict(named_weights(model))
        self.weights = HybridWeights(trained, mesh, context.groups[WEIGHTS], targets)
        self.weights.start()
        self.weights.wait()
        if is_cut:
            self.packed.measure_heads()
        else:
            self.packed = PackedModel(model, fused_kernels=options.fused_kernels)
            self._engine = TorchEngine(model, frozen, packed=self.packed)
        self.weights.release()

    @contextmanager
    def filled(self, *, overlap: bool = False) -> Iterator[TrainEngine]:
        """Inside, the weights are there: as they are trained at the time of entry.

        Args:
            overlap: do not wait for them; the first forward of `packed` does, part by part.
        """
        self.weights.start()
        try:
            if overlap:
                self.packed.ready = self.weights.ready
            else:
                self.weights.wait()
            yield self._engine
        finally:
            self.packed.ready = None
            self.weights.release()
