"""Code that runs in vLLM's workers: a weight-transfer backend, and log-probs as the trainer defines them.

vLLM imports this module where it is given `--worker-extension-cls verl.rollout.vllm.worker.WorkerExtension` and
`--weight-transfer-config '{"backend": "verl"}'`; the in-process engine says so itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from verl.rollout.vllm.transport import received
from verl.weights.shards import whole_weights

BACKEND = "verl"
_HEAD = "lm_head.weight"
_GREEDY = 1e-5  # vLLM's own bound: a lower temperature is greedy


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A part of the weights of one policy version.

    Attributes:
        weights: shards, by the checkpoint names of their weights: a message of a `Transport`.
        tied: further names of tied weights, which come once but of which vLLM may keep copies.
    """

    version: int
    weights: Mapping[str, Any]
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)


class ShardTransfer(WeightTransferEngine[WeightTransferInitInfo, UpdateInfo]):
    """Puts the shards of a policy version together, however they are cut, and loads them by vLLM's own loaders, one
    whole weight at a time. vLLM keeps the weights of a layer until it has them all, and copies them into the tensors
    that it computes with: fused, packed or quantised. A failure before the first shard leaves the old weights.

    `served` is the version of the model's weights. None: those it started with, or unknown because an update has begun
    and not ended.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo
    served: int | None = None
    _version: int | None = None

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._version = None

    def _begin(self) -> None:
        """Begin a version; one that was not ended is given up."""
        # Modules that await weights get the tensors that they compute with, as they are.
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.load_numel = info.load_numel_total = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._loaded: set[str] = set()
        #: Weights that are not whole, and how many of their elements are missing.
        self._parts: dict[str, tuple[Tensor, int]] = {}
        self._head: Tensor | None = None

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read and check some shards, and load the weights that are whole now.

        Raises:
            ValueError: no shards came, or others than were sent.
        """
        shards = received(update_info.weights, self.parallel_config.rank, self.device)
        if self._version is None:
            self.served, self._version = None, update_info.version
            self._begin()
        for shard in whole_weights(shards, self._parts):
            names, tensor = (shard.name, *update_info.tied.get(shard.name, ())), shard.tensor
            if _HEAD in names:  # some columns of it are read back later
                self._columns = sorted({0, tensor.shape[1] // 3, tensor.shape[1] - 1})
                self._head = tensor[:, self._columns]
            loads = self.model.load_weights((name, tensor) for name in names)
            self._loaded |= self._expected if loads is None else set(loads)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """End the update.

        Raises:
            ValueError: nothing was received; a weight of the model is missing; the output layer kept old weights.
        """
        if self._version is None:
            raise ValueError("nothing was received since start_weight_update")
        if lacking := sorted({*self._parts, *self._expected - self._loaded}):
            raise ValueError(f"{len(lacking)} weights of the model did not come, such as {lacking[0]}")
        finalize_layerwise_reload(self.model, self.model_config)
        head: Any = getattr(self.model, "lm_head", None)
        method: Any = getattr(head, "quant_method", None)
        if self._head is not None and head is not None and "Unquantized" in type(method).__name__:
            # Columns of the output layer are read back by multiplying unit vectors, which is exact: a layer with a
            # packed copy (as a tied one on CPU) might otherwise keep old weights unnoticed.
            weight, count = head.weight, len(self._columns)
            units = torch.zeros(count, weight.shape[1], dtype=weight.dtype, device=weight.device)
            units[torch.arange(count), torch.tensor(self._columns)] = 1
            served = method.apply(head, units, bias=None)
            start, end = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
            if not torch.equal(served[:, : end - start], self._head[start:end].t().to(served)):
                raise ValueError("the output layer has other weights than those that came")
        self.served = self._version

    def shutdown(self) -> None:
        self._version = None


class ScaledSampler(Sampler):
    """Applies the temperature first, so that vLLM's raw log-probs are of temperature-scaled logits."""

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> Any:
        temperature = sampling_metadata.temperature
        if temperature is not None:
            greedy = temperature < _GREEDY
            logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
            sampling_metadata = replace(sampling_metadata, temperature=torch.where(greedy, temperature, 1.0))
        return super().forward(logits, sampling_metadata, *args, **kwargs)


class WorkerExtension:
    """Methods added to vLLM's worker, for `collective_rpc`."""

    def verl_prepare(self) -> dict[str, bool]:
        """Whether log-probs are now of temperature-scaled logits."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if type(getattr(runner, "sampler", None)) is Sampler:
            runner.sampler.__class__ = ScaledSampler
        return {"scaled": isinstance(getattr(runner, "sampler", None), ScaledSampler)}

    def verl_dropped(self) -> None:
        """The weights were dropped: no version is served from now on."""
        self.weight_transfer_engine.served = None  # type: ignore[attr-defined]

    def verl_served(self) -> dict[str, int | None]:
        """The policy version whose weights this worker has."""
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {"version": getattr(transfer, "served", None)}


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShardTransfer)
