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
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from verl.rollout.vllm.transport import received
from verl.rollout.vllm.weights import WeightSink

BACKEND = "verl"
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
    """Puts each part of a policy version in place when it comes. A failure before the first one leaves the old weights.

    `served` is the version of the model's weights. None: those it started with, or unknown because an update has begun
    and not ended.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: int | None = None
        self._sink = WeightSink(self.model, self.model_config)
        self._version: int | None = None

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._version = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read and check some shards, and put them in place.

        Raises:
            ValueError: no shards came, or others than were sent.
        """
        shards = received(update_info.weights, self.parallel_config.rank, self.device)
        if self._version is None:
            self.served, self._version = None, update_info.version
            self._sink.begin()
        for shard in shards:
            self._sink.take(shard, update_info.tied.get(shard.name, ()))

    def finish_weight_update(self) -> None:
        """End the update.

        Raises:
            ValueError: nothing was received; a weight of the model is missing; the output layer kept old weights.
        """
        if self._version is None:
            raise ValueError("nothing was received since start_weight_update")
        self._sink.end()
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
