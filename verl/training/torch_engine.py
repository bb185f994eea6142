"""The training engine on torch alone: any layout that `parallelize` knows."""

from __future__ import annotations

import torch

from verl.training.engine import TrainEngine, WeightSource
from verl.training.forward import Forward
from verl.training.local_weights import ModelWeights, WholeModel
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import EngineOptions, OptimConfig
from verl.training.parallelize import parallelize
from verl.training.ranks import Ranks
from verl.training.runner import MicroBatchRunner
from verl.training.steps import OptimizerSteps
from verl.weights.meta import give_memory
from verl.weights.shard import local_part
from verl.weights.shards import load_model_shards


class TorchEngine(TrainEngine):
    """A `TrainEngine` whose live tensors are the model's: none is copied. Where the mesh cuts weights, the model's
    parameters are DTensors from then on."""

    weights: ModelWeights
    steps: OptimizerSteps | None = None

    def assemble(self, forward: Forward, ranks: Ranks, options: EngineOptions, source: WeightSource | None) -> None:
        model, whole = self.model, WholeModel(self.model)
        parallel = parallelize(forward, ranks, options.fsdp_config, trains=options.trains)
        # Only now, when the model is cut: a rank allocates and reads its own parts, and never has the whole model.
        if source is not None:
            # What torch offloads, it demands in host memory from the first forward on.
            is_offloaded = options.fsdp_config.param_offload and ranks.mesh.layout.shard > 1
            give_memory(forward, "cpu" if is_offloaded else forward.packed.device)
            load_model_shards(model, source(model), whole.shapes)
        self.runner = MicroBatchRunner(forward, ranks, options, parallel)
        self.weights = ModelWeights(model, whole, parallel.dtypes, ranks)
        if not options.trains:
            return
        # A weight that ranks cut is two parameters here: the model's DTensor, which autograd gives the gradient to, and
        # this rank's part of it on the same memory, which the optimizer steps. A whole weight is both.
        trained = dict(model.named_parameters())
        cut = {name: weight for name, weight in trained.items() if hasattr(weight, "placements")}
        # The part here of a weight that ranks cut, on the same memory.
        pieces = {name: torch.nn.Parameter(local_part(w).detach(), w.requires_grad) for name, w in cut.items()}
        is_scaled = torch.float16 in parallel.dtypes.values()
        config = options.optim or OptimConfig(max_grad_norm=None)
        optimizer = MixedPrecisionOptimizer(
            trained, config, options.optimizer, trained | pieces, is_scaled=is_scaled, scheduler=options.scheduler
        )
        self.steps = OptimizerSteps(self.runner, optimizer, self.weights)
