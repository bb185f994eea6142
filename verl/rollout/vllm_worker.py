"""Code that runs in vLLM's workers: a weight-transfer backend, and log-probs as the trainer defines them.

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
    """No initialisation is needed."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """All weights of one policy version, by their checkpoint names.

    Attributes:
        tied: further names of tied weights, which come once but of which vLLM may keep copies.
        path: a safetensors file that the worker can read, and `checksum` of its content; or
        weights: the tensors themselves, for a worker in the trainer's process.
    """

    version: int
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    path: str | None = None
    checksum: str | None = None
    weights: list[tuple[str, Tensor]] | None = None


class ShardTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies a policy version as a whole: a failure before `finish_weight_update` leaves the old weights.

    `served` is the version of the model's weights. None: those it started with, or unknown because an update failed
    while it was applied.
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
        """Read and check all weights; the model is not changed.

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
        """Apply the received weights to the model.

        Raises:
            ValueError: nothing was received; a weight of the model is missing; the output layer kept old weights.
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
    """Applies the temperature first, so that vLLM's raw log-probs are those of temperature-scaled logits."""

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
    """Read columns of the output layer back by multiplying unit vectors, which is exact: a layer with a packed copy (as
    a tied one on CPU) might otherwise keep old weights unnoticed."""
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
