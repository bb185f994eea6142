"""Actors under the names of training back ends, and models that a subclass builds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import torch

from verl._base.names import check_known
from verl._host.ranks import local_ranks, registry, torchrun_ranks
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.training.options import FSDPConfig, OptimConfig, TrainOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.keywords import ActorArguments, BuiltArguments

#: FSDP1's sharding strategy -> whether weights are cut, and freed after the forward pass.
_STRATEGIES = {
    "FULL_SHARD": (True, True),
    "SHARD_GRAD_OP": (True, False),
    "NO_SHARD": (False, True),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (True, False),
}

#: Megatron-LM's name of a size -> that of the setting.
_MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
}


class BuiltWorker(Actor):
    """An actor over the model that `_build_model_optimizer` makes; a subclass overrides it for a model of its own.

    Args:
        model_path: directory or hub name of the model.
        optim_config: `OptimConfig`, or a mapping of its fields; `optim` is the same.
        override_model_config: passed on to `_build_model_optimizer`.
        **options: passed to `Actor`.
    """

    def __init__(
        self,
        model_path: Any,
        tokenizer: Any = None,
        *,
        optim_config: OptimConfig | Mapping[str, Any] | None = None,
        override_model_config: Mapping[str, Any] | None = None,
        **options: Unpack[ActorArguments],
    ) -> None:
        training = TrainOptions.of(options.pop("train", None), "train")
        if (fsdp_config := options.pop("fsdp_config", None)) is not None:
            training = training.replace(fsdp_config=FSDPConfig.of(fsdp_config, "fsdp_config"))
        if optim_config is not None:
            training = training.replace(optim=OptimConfig.of(optim_config, "optim_config"))
        overrides = dict(override_model_config or {})
        built = self._build_model_optimizer(model_path, training.fsdp_config, training.optim, overrides, role="actor")
        parts = built if isinstance(built, tuple) else (built,)
        if not 1 <= len(parts) <= 3:
            raise ConfigError(
                f"_build_model_optimizer gives a model, an optimizer and a schedule, not {len(parts)} things"
            )
        model, optimizer, scheduler = (*parts, None, None)[:3]
        if optimizer is not None:
            options["optim"] = optimizer
        elif scheduler is not None:
            raise ConfigError("_build_model_optimizer gave a schedule without the optimizer that it is of")
        if tokenizer is None and model is not model_path and isinstance(model_path, str):
            tokenizer = model_path
        options["train"] = training
        super().__init__(model, tokenizer, **options)
        self.train_with(scheduler=scheduler)
        registry.add(type(self).__name__, scheduler=scheduler)

    def _build_model_optimizer(
        self,
        model_path: Any,
        fsdp_config: FSDPConfig,
        optim_config: OptimConfig,
        override_model_config: Mapping[str, Any],
        role: str = "actor",
    ) -> Any:
        """Make what is trained: a transformers model (plain or wrapped, see `Actor`) or its name, or a tuple of model,
        optimizer and learning-rate scheduler (torch's, or None). Optimizer and scheduler may be functions that make
        them, of the parameters and of the optimizer; with sharded weights, or on Ray, they must be.

        Called by all ranks of a torchrun job, before the first call.
        """
        if override_model_config:
            raise ConfigError(
                f"override_model_config ({', '.join(override_model_config)}) is for a _build_model_optimizer of your "
                "own: override it, and make the model there"
            )
        return model_path

    @contextmanager
    def init_context(self) -> Iterator[None]:
        """For making a model: on the CPU, and what initialises its weights is not recorded for gradients."""
        with torch.device("cpu"), torch.no_grad():
            yield

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """torch's mesh over the ranks of this job, in one dimension, "dp"."""
        from verl.cluster.world import init_device_mesh

        return init_device_mesh(dp=torchrun_ranks())


class FSDPWorker(BuiltWorker):
    """An actor trained by FSDP2: `FSDPWorker(model_name="gpt2", fsdp_config={"sharding_strategy": "FULL_SHARD"})`.

    Args:
        model_name: directory or hub name of the model.
        fsdp_config: `FSDPConfig`, or a mapping of its fields and `sharding_strategy`, as FSDP1 has them (a name, or
            torch's enumeration): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD (replicas), HYBRID_SHARD (cut over the ranks of a
            machine, unless `fsdp_size` says otherwise).
        **options: passed to `BuiltWorker`.

    Raises:
        ConfigError: there is no such sharding strategy, or on Ray HYBRID_SHARD without `fsdp_size`.
    """

    def __init__(self, model_name: Any, tokenizer: Any = None, **options: Unpack[BuiltArguments]) -> None:
        fsdp_config = options.get("fsdp_config")
        sharding_config = dict(fsdp_config) if isinstance(fsdp_config, Mapping) else {}
        sharding = sharding_config.pop("sharding_strategy", "FULL_SHARD")
        name = str(getattr(sharding, "name", sharding))
        check_known("fsdp_config: no sharding_strategy is called", [name], _STRATEGIES)
        is_cut, is_freed = _STRATEGIES[name]
        if not is_freed:
            sharding_config.setdefault("reshard_after_forward", False)
        self._lacks_size = "HYBRID" in name and "fsdp_size" not in sharding_config
        if self._lacks_size:
            sharding_config["fsdp_size"] = local_ranks()
        options["fsdp_config"] = fsdp_config if isinstance(fsdp_config, FSDPConfig) else sharding_config
        options.setdefault("strategy", "fsdp" if is_cut else "ddp")
        super().__init__(model_name, tokenizer, **options)

    def set_placement(self, placement: Any) -> None:
        super().set_placement(placement)
        if self._lacks_size and self.controller.executor == "ray":
            raise ConfigError("fsdp_config: HYBRID_SHARD needs fsdp_size, the ranks that one copy is cut over")


class MegatronWorker(BuiltWorker):
    """An actor trained by Megatron-LM's layers: `MegatronWorker(model_name="Qwen/Qwen2.5-7B",
    megatron_config={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})`.

    Args:
        model_name: directory or hub name of the model.
        megatron_config: `tensor_model_parallel_size` and `pipeline_model_parallel_size`, the ranks that share each
            layer, and the layers; the rest of the ranks are replicas. They override `train`'s.
        **options: passed to `BuiltWorker`.

    Raises:
        ConfigError: megatron_config has something else.
    """

    def __init__(
        self,
        model_name: Any,
        tokenizer: Any = None,
        *,
        megatron_config: Mapping[str, Any] | None = None,
        **options: Unpack[BuiltArguments],
    ) -> None:
        check_known("megatron_config: there is no", megatron_config or {}, _MEGATRON_SIZES)
        sizes = {_MEGATRON_SIZES[name]: size for name, size in (megatron_config or {}).items()}
        options["train"] = TrainOptions.of(options.get("train"), "train").replace(**sizes)
        options.setdefault("strategy", "megatron")
        super().__init__(model_name, tokenizer, **options)
