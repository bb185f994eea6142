"""What runs inside vLLM's workers: a weight-transfer backend, and log-probs as the trainer defines them.

vLLM imports this module where it is given `--worker-extension-cls verl.rollout.vllm_worker.WorkerExtension` and
`--weight-transfer-config '{"backend": "verl"}'`; the in-process engine says so itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from verl.shard import Shard, checksum

BACKEND = "verl"
_GREEDY = 1e-5  # vLLM's own bound: a lower temperature is greedy


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """All weights of one policy version, by their checkpoint names. Tied ones come once; `tied` has their other names,
    under which vLLM may keep copies.

    Either `weights`, the tensors themselves, for a worker of the trainer's own process; or `path`, a safetensors
    file that the worker can see, with the `checksum` of its content.
    """

    version: int
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    path: str | None = None
    checksum: str | None = None
    weights: list[tuple[str, Tensor]] | None = None


class ShardTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes a policy version as a whole: what fails before `finish_weight_update` leaves the old weights.

    `served` is the version whose weights the model has, or None: those it started with, or unknown after an update
    that failed while it was being applied.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: int | None = None
        self._staged: tuple[int, dict[str, Tensor]] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._staged = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read and check everything; the model is not touched.

        Raises:
            ValueError: there are no weights, or not those that were sent.
        """
        if update_info.weights is not None:
            weights = dict(update_info.weights)
        elif update_info.path is not None and Path(update_info.path).is_file():
            weights = load_file(update_info.path)
            if checksum(Shard.whole(name, tensor) for name, tensor in weights.items()) != update_info.checksum:
                raise ValueError(f"the weights in {update_info.path} are not those that were sent")
        else:
            raise ValueError(f"no weights came: there is no file '{update_info.path}' where this worker runs")
        aliases = {other: weights[name] for name, others in update_info.tied.items() for other in others}
        self._staged = update_info.version, {**weights, **aliases}

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Put what was received in the model.

        Raises:
            ValueError: nothing was received; a weight of the model did not come; the output layer kept old weights.
        """
        if self._staged is None:
            raise ValueError("nothing was received since start_weight_update")
        (version, weights), self._staged = self._staged, None
        self.served = None
        initialize_layerwise_reload(self.model)
        expected = {name for name, _ in self.model.named_parameters()}
        loaded = self.model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        if missing := sorted(expected - set(loaded or expected)):
            raise ValueError(f"{len(missing)} weights of the model did not come, such as {missing[0]}")
        _check_head(self.model, weights.get("lm_head.weight"))
        self.served = version

    def shutdown(self) -> None:
        self._staged = None


class ScaledSampler(Sampler):
    """Applies the temperature first, so that raw log-probs are of temperature-scaled logits, before all else."""

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> Any:
        temperature = sampling_metadata.temperature
        if temperature is not None:
            greedy = temperature < _GREEDY
            logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
            sampling_metadata = replace(sampling_metadata, temperature=torch.where(greedy, temperature, 1.0))
        return super().forward(logits, sampling_metadata, *args, **kwargs)


class WorkerExtension:
    """Verbs added to vLLM's worker, for `collective_rpc`."""

    def verl_prepare(self) -> dict[str, bool]:
        """Whether log-probs are now of temperature-scaled logits."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if type(getattr(runner, "sampler", None)) is Sampler:
            runner.sampler.__class__ = ScaledSampler
        return {"scaled": isinstance(getattr(runner, "sampler", None), ScaledSampler)}

    def verl_served(self) -> dict[str, int | None]:
        """The policy version whose weights this worker has."""
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {"version": getattr(transfer, "served", None)}


def _check_head(model: nn.Module, weight: Tensor | None) -> None:
    """Read columns of the output layer back through its own product, which is exact for unit vectors: a layer that
    keeps a packed copy (as a tied one on CPU does) would go on with old weights, and nothing else would tell."""
    head = getattr(model, "lm_head", None)
    method: Any = getattr(head, "quant_method", None)
    if weight is None or head is None or "Unquantized" not in type(method).__name__:
        return
    width = weight.shape[1]
    columns = torch.tensor(sorted({0, width // 3, width - 1}))
    units = torch.zeros(len(columns), width, dtype=head.weight.dtype, device=head.weight.device)
    units[torch.arange(len(columns)), columns] = 1
    served = method.apply(head, units, bias=None)
    start, end = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    sent = weight[start:end, columns].t().to(served)
    if not torch.equal(served[:, : end - start], sent):
        raise ValueError("the output layer has other weights than those that came")


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShardTransfer)
