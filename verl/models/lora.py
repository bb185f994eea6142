"""Adapters of weights (LoRA; Hu et al. 2021, arXiv 2106.09685), by peft.

A model with adapters is the transformers model itself with peft's layers in the place of some of its own. What was
`q_proj.weight` is then `q_proj.base_layer.weight`, frozen, beside `q_proj.lora_A.default.weight` and
`q_proj.lora_B.default.weight`, which are trained.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from verl.errors import ConfigError, ModelError
from verl.layout import ModelShape
from verl.models.blank import is_blank
from verl.models.int4 import Int4Linear, make_int4
from verl.models.options import LoraOptions
from verl.models.shards import model_shards
from verl.shard import Shard


def add_lora(model: nn.Module, options: LoraOptions, seed: int = 0) -> None:
    """Give a transformers model adapters that change nothing yet, in the dtype of its weights; all other weights are
    frozen.

    Args:
        model: changed in place. Adapters of one without weights have none either: `first_adapters` has them.
        seed: of the random half of each adapter.

    Raises:
        ConfigError: peft is not installed, no layer has such a name, or the model has adapters already.
    """
    if has_adapters(model):
        raise ConfigError("model.lora: the model has adapters already, which are trained: leave lora out")
    peft = _peft()
    targets = "all-linear" if options.targets == ("all-linear",) else list(options.targets)
    config = peft.LoraConfig(r=options.r, lora_alpha=options.alpha, target_modules=targets)
    with torch.random.fork_rng(), torch.device("meta") if is_blank(model) else nullcontext():
        torch.manual_seed(seed)
        try:
            _inject(_inner(model), config, "default", _inner(model).dtype)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets: {str(error).splitlines()[0]}") from error
    weights = dict(model.named_parameters())
    for name, tensor in first_adapters({name: weight.shape for name, weight in weights.items()}, seed):
        weights[name].data.copy_(tensor)


def first_adapters(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What adapters of layers begin with, by the names and shapes of a model's weights in their order, in fp32: random
    numbers and zeros (section 4.1 of the paper; uniform ones, as peft draws them), whose product is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if ".lora_A." in name:
            bound = math.prod(shape[1:]) ** -0.5
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:
            yield name, torch.zeros(shape)


def base_name(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether that is the name of an adapter's weight, as opposed to one of the model without adapters."""
    return ".lora_" in name


def has_adapters(model: Any) -> bool:
    """Whether a transformers model (or the backbone of a `ValueModel`) has adapters of peft."""
    return bool(getattr(_inner(model), "peft_config", None))


def shape_of(model: Any) -> ModelShape:
    """What of a model and its adapters decides which layouts are possible."""
    weights = model.named_parameters()
    stacked = any(weight.dim() > 2 and ".base_layer." in name and not is_adapter(name) for name, weight in weights)
    return ModelShape.of(model.config, adapters=has_adapters(model), adapts_experts=stacked)


def layer_changes(model: Any) -> dict[str, Any]:
    """Which layers of a model are not those that its configuration makes, as JSON: those in 4 bits, and adapters."""
    inner = _inner(model)
    int4 = [name.removesuffix(".base_layer") for name, m in inner.named_modules() if isinstance(m, Int4Linear)]
    return {"int4": int4, "adapters": _adapter_config(inner) if has_adapters(inner) else None}


def change_layers(model: Any, saved: Mapping[str, Any]) -> None:
    """Give a model, as its configuration makes it, the layers that `layer_changes` noted; weights are still to come.

    Raises:
        ModelError: they cannot be made on this model.
    """
    inner = _inner(model)
    try:
        make_int4(inner, saved["int4"])
        if saved["adapters"] is not None:
            _restore_adapters(inner, saved["adapters"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the layers cannot be made on this {type(inner).__name__}: {error}") from error


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, forwards are those of the base. Weights and what of them is trained stay as they are."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [module._disable_adapters for module in layers]
    try:
        for module in layers:
            # Not by `enable_adapters`: it freezes the adapters, and FSDP notes that in their gathered copies.
            module._disable_adapters = True  # type: ignore[assignment]
        yield
    finally:
        for module, flag in zip(layers, before, strict=True):
            module._disable_adapters = flag


@torch.no_grad()
def merged_shards(model: nn.Module) -> Iterator[Shard]:
    """The weights of the equal plain model, under its names: each adapter is added to a copy of its layer, and weights
    in 4 bits are restored, one layer at a time. The live weights stay as they are. All of them must be whole."""
    adapted = {name: module for name, module in model.named_modules() if _is_changed(module)}
    done: set[str] = set()
    for shard in model_shards(model):
        parts = shard.name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        owner = next((prefix for prefix in prefixes if prefix in adapted), None)
        if owner is None:
            yield shard
        elif owner not in done:
            done.add(owner)
            for name, tensor in _merged(adapted[owner]).state_dict().items():
                yield Shard.whole(f"{owner}.{name}", tensor)


def save_adapter(model: nn.Module, path: str | Path) -> None:
    """Write the adapters alone as a directory that peft loads: `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ModelError: the model has none.
    """
    if not has_adapters(model):
        raise ModelError("the model has no adapters: write it whole")
    from peft import get_peft_model_state_dict

    inner, path = _inner(model), Path(path)
    ((name, config),) = inner.peft_config.items()
    weights = get_peft_model_state_dict(inner, adapter_name=name, save_embedding_layers=False)
    path.mkdir(parents=True, exist_ok=True)
    prefixed = {f"base_model.model.{key}": weight.detach().cpu().contiguous() for key, weight in weights.items()}
    save_file(prefixed, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(inner, "name_or_path", None)
    config.save_pretrained(path)


def _adapter_config(inner: Any) -> dict[str, Any]:
    ((name, config),) = inner.peft_config.items()
    dtype = next(weight.dtype for weight_name, weight in inner.named_parameters() if f".{name}" in weight_name)
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    # By their full names: a value model's backbone has others than the language model it was taken from.
    layers = [layer for layer, module in inner.named_modules() if hasattr(module, "base_layer")]
    values["target_modules"] = layers
    values["peft_type"] = str(getattr(config.peft_type, "value", config.peft_type))
    return {"name": name, "dtype": str(dtype).removeprefix("torch."), "config": values}


def _restore_adapters(inner: Any, saved: Mapping[str, Any]) -> None:
    values = {**saved["config"], "init_lora_weights": True}  # other starts change the base, whose weights come too
    with torch.random.fork_rng():
        config = _peft().PeftConfig.from_peft_type(**values)
        _inject(inner, config, saved["name"], getattr(torch, saved["dtype"]))


def _merged(module: nn.Module) -> nn.Module:
    """A plain layer: a copy of this one with its adapter added to its weights."""
    if isinstance(module, Int4Linear):
        return module.dense()
    if (whole := getattr(module, "modules_to_save", None)) is not None:
        return whole[module.active_adapter]  # type: ignore[no-any-return]
    layer: Any = copy.deepcopy(module)
    for part in reversed([part for part in layer.modules() if hasattr(part, "_disable_adapters")]):
        if isinstance(base := getattr(part, "base_layer", None), Int4Linear):
            part.base_layer = base.dense()
        part.merge()
    return layer.get_base_layer()  # type: ignore[no-any-return]


def _is_changed(module: nn.Module) -> bool:
    return isinstance(module, Int4Linear) or hasattr(module, "_disable_adapters")


def _inject(model: Any, config: Any, name: str, dtype: torch.dtype) -> None:
    before = set(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # which peft sets itself
        _peft().inject_adapter_in_model(config, model, adapter_name=name)
    for weight in set(model.parameters()) - before:
        weight.data = weight.data.to(dtype)


def _inner(model: Any) -> Any:
    return getattr(model, "backbone", model)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora needs peft, which is not installed: pip install 'verl-hybrid[lora]'") from error
    return peft
