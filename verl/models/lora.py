"""Adapters of weights (LoRA; Hu et al. 2021, arXiv 2106.09685), by peft.

A model with adapters is the transformers model itself, some of its layers replaced by peft's: `q_proj.weight` becomes
`q_proj.base_layer.weight`, frozen, next to the trained `q_proj.lora_A.default.weight` and
`q_proj.lora_B.default.weight`.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from verl._base.extras import load_extra
from verl._base.names import check_known
from verl.errors import ConfigError, ModelError
from verl.models.int4 import Int4Linear
from verl.models.options import LoraOptions
from verl.weights.layout import ModelShape
from verl.weights.shard import Shape, Shard, blocks_of, local_part

_TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: The number of a layer in the name of a module, as peft finds it, and the name of the list that holds it.
_NUMBER = re.compile(r".*?([^.]+)\.(\d+)\.")
#: Fields of a configuration of peft that are lists of names.
_FIELDS = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters", "trainable_token_indices")


def add_lora(model: nn.Module, options: LoraOptions, seed: int = 0) -> None:
    """Give a transformers model adapters that change nothing yet, in the dtype of its weights; all other weights are
    frozen.

    Args:
        model: changed in place. On the meta device its adapters have no weights either: `first_adapters` has them.
        seed: of the random half of each adapter.

    Raises:
        ConfigError: peft is not installed, no layer has such a name, or the model has adapters already.
    """
    if has_adapters(model):
        raise ConfigError("model.lora: the model has adapters already, which are trained: leave lora out")
    peft, inner = load_extra("peft", "lora", "model.lora"), _inner(model)
    targets = "all-linear" if options.targets == ("all-linear",) else list(options.targets)
    base = getattr(inner, "name_or_path", None) or None
    config = peft.LoraConfig(
        r=options.r, lora_alpha=options.alpha, target_modules=targets, base_model_name_or_path=base
    )
    if targets != "all-linear":
        check_known("model.lora.targets: the model has no", targets, _ends(_modules(inner), targets))
    on_meta = any(weight.is_meta for weight in model.parameters())
    with torch.random.fork_rng(), torch.device("meta") if on_meta else nullcontext():
        torch.manual_seed(seed)
        try:
            _inject(inner, config, "default", inner.dtype)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets: {str(error).splitlines()[0]}") from error
    weights = dict(model.named_parameters())
    for name, tensor in first_adapters({name: weight.shape for name, weight in weights.items()}, seed):
        weights[name].data.copy_(tensor)


def first_adapters(shapes: Mapping[str, Shape], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
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
    """The properties of a model and its adapters that decide which layouts are possible."""
    weights = dict(model.named_parameters())
    inner = _inner(model)
    return ModelShape.of(
        model.config,
        adapters=has_adapters(model),
        adapts_experts=any(w.dim() > 2 and ".base_layer." in n and not is_adapter(n) for n, w in weights.items()),
        dtypes=tuple(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})),
        trained=frozenset(weight.requires_grad for weight in weights.values()),
        not_trainable=next((str(w.dtype) for w in weights.values() if w.requires_grad and w.dtype not in _TRAINED), ""),
        no_recomputation="" if getattr(inner, "supports_gradient_checkpointing", True) else type(inner).__name__,
    )


def layer_changes(model: Any) -> dict[str, Any]:
    """Which layers of a model are not those that its configuration makes, as JSON: those in 4 bits, and adapters."""
    inner = _inner(model)
    int4 = [name.removesuffix(".base_layer") for name, m in inner.named_modules() if isinstance(m, Int4Linear)]
    if not has_adapters(inner):
        return {"int4": int4, "adapters": None}
    ((name, config),) = inner.peft_config.items()
    dtype = next(weight.dtype for weight_name, weight in inner.named_parameters() if f".{name}" in weight_name)
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    # By their full names: a value model's backbone has others than the language model it was taken from.
    layers = {layer: module for layer, module in inner.named_modules() if hasattr(module, "base_layer")}
    # Those of single parameters (experts) are named apart, by target_parameters.
    values["target_modules"] = [name for name, module in layers.items() if not hasattr(module, "parameter_name")]
    if "feedforward_modules" in values:
        values["feedforward_modules"] = [layer for layer, module in layers.items() if module.is_feedforward]
    values["peft_type"] = str(getattr(config.peft_type, "value", config.peft_type))
    adapters = {"name": name, "dtype": str(dtype).removeprefix("torch."), "config": values}
    return {"int4": int4, "adapters": adapters}


def change_layers(model: Any, saved: Mapping[str, Any]) -> None:
    """Give a model, as its configuration makes it, the layers that `layer_changes` noted; weights are still to come.

    Raises:
        ModelError: they cannot be made on this model.
    """
    inner = _inner(model)
    try:
        for name in saved["int4"]:
            layer = inner.get_submodule(name)
            empty = Int4Linear(layer.out_features, layer.in_features, layer.bias, layer.weight.dtype)
            inner.set_submodule(name, empty.to(layer.weight.device))
        if (adapters := saved["adapters"]) is not None:
            with torch.random.fork_rng():
                peft = load_extra("peft", "lora", "model.lora")
                config = peft.PeftConfig.from_peft_type(**adapters["config"])
                _inject(inner, config, adapters["name"], getattr(torch, adapters["dtype"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the layers cannot be made on this {type(inner).__name__}: {error}") from error


@contextmanager
def adapters_off(model: nn.Module, first: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
    """Inside, the model computes as the published base. Its weights, and which of them are trained, do not change.

    Args:
        first: see `reference_weights`.
    """
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [module._disable_adapters for module in layers]
    live = {name: local_part(w.detach()) for name, w in model.named_parameters() if name in (first or ())}
    trained = {name: weight.clone() for name, weight in live.items()}
    try:
        for name, weight in live.items():
            weight.copy_((first or {})[name])
        for module in layers:
            # Not by `enable_adapters`: it freezes the adapters, and FSDP notes that in their gathered copies.
            module._disable_adapters = True  # type: ignore[assignment]
        yield
    finally:
        for module, flag in zip(layers, before, strict=True):
            module._disable_adapters = flag
        for name, weight in live.items():
            weight.copy_(trained[name])


def reference_weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the trained weights that are not switched off with the adapters (biases), of a model that has not been
    trained yet: the published base needs them as they were. Of cut weights, the local part."""
    if not has_adapters(model):
        return {}
    switched_off = set[str]()
    for name, module in model.named_modules():
        if hasattr(module, "_disable_adapters"):
            layers = tuple(getattr(module, "adapter_layer_names", ()))
            switched_off.update(f"{name}.{part}" for part, _ in module.named_parameters() if part.startswith(layers))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return {name: local_part(w.detach()).clone() for name, w in trained.items() if name not in switched_off}


@torch.no_grad()
def merged_shards(model: nn.Module) -> Iterator[Shard]:
    """The weights of the equal plain model, under its names: each adapter is added to a copy of its layer, and weights
    in 4 bits are restored, one layer at a time. The live weights stay as they are. All of them must be whole."""
    adapted, state = _changed(model), model.state_dict(keep_vars=True)
    live = {id(tensor) for tensor in state.values()}
    done, seen = set[str](), set[int]()
    for name, tensor in state.items():
        owner = next((outer for outer in adapted if name.startswith(f"{outer}.")), None)
        if owner is None:
            # Tied ones once; a weight whose alias is adapted is no alias of what that becomes.
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield from (Shard(name, tuple(tensor.shape), *block) for block in blocks_of(tensor.detach()))
        elif owner not in done:
            done.add(owner)
            for part, merged in _merged(adapted[owner]).state_dict(keep_vars=True).items():
                if id(merged) not in seen:
                    seen.update({id(merged)} & live)  # others are gone at once, and their ids come again
                    yield Shard.whole(f"{owner}.{part}", merged.detach())


@contextmanager
def merged_forwards(model: nn.Module) -> Iterator[None]:
    """Inside, each layer computes as the plain one that an export makes of it, which lives for that call alone."""
    layers = _changed(model).values()
    try:
        for layer in layers:
            layer.forward = lambda *args, layer=layer, **kwargs: _merged(layer)(*args, **kwargs)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def save_adapter(model: nn.Module, path: str | Path) -> None:
    """Write the adapters alone as a directory that peft loads over the published base: `adapter_config.json` and
    `adapter_model.safetensors`.

    Raises:
        ModelError: the model has no adapters.
    """
    if not has_adapters(model):
        raise ModelError("the model has no adapters: write it whole")
    from peft import get_peft_model_state_dict

    inner, path = _inner(model), Path(path)
    ((name, config),) = inner.peft_config.items()
    config = copy.deepcopy(config)
    weights = get_peft_model_state_dict(inner, adapter_name=name, save_embedding_layers=False)
    path.mkdir(parents=True, exist_ok=True)
    # Some forms have tensors in common, which a file has once each.
    tensors = {f"base_model.model.{key}": w.detach().cpu().clone().contiguous() for key, w in weights.items()}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(inner, "name_or_path", None)
    config.save_pretrained(path)


def check_adapter_names(model: nn.Module, config: Any, setting: str) -> None:
    """Look up every name and number of a layer in a configuration of peft.

    Args:
        model: with or without its adapters.
        setting: what the configuration is called in messages.

    Raises:
        ConfigError: one matches nothing; names the nearest that does.
    """

    def check(field: str, names: Iterable[Any], known: set[Any]) -> None:
        check_known(f"{setting}.{field}: the model has no", names, known)

    modules, weights = _modules(model), [base_name(name) for name, _ in model.named_parameters()]
    for field in _FIELDS:
        value = getattr(config, field, None) or ()  # a text is a pattern, and whole numbers are tokens
        names = [] if isinstance(value, str) else [name for name in value if isinstance(name, str)]
        # What peft itself adds for a classifier.
        names = [name for name in names if field != "modules_to_save" or name not in ("classifier", "score")]
        check(field, names, _ends(weights if field == "target_parameters" else modules, names))
    numbered = [match for name in modules if (match := _NUMBER.match(f"{name}."))]
    layers, lists = (getattr(config, field, None) or () for field in ("layers_to_transform", "layers_pattern"))
    layers = [layers] if isinstance(layers, int) else layers
    check("layers_to_transform", layers, {int(match[2]) for match in numbered})
    check("layers_pattern", [lists] if isinstance(lists, str) else lists, {match[1] for match in numbered})
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, field, None) or ():
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in (*modules, *weights)):
                check(field, [pattern], _ends(modules, [pattern]))


def _modules(model: nn.Module) -> list[str]:
    """The names of modules as they are without adapters."""
    return [re.sub(r"\.(base_layer|original_module)$", "", name) for name, _ in model.named_modules() if name]


def _ends(names: Iterable[str], like: Iterable[str]) -> set[str]:
    """The last parts of some names, as many as the names to compare have; not a layer's number."""
    split = [name.split(".") for name in names]
    return {".".join(parts[-n:]) for n in {name.count(".") + 1 for name in like} for parts in split
            if not parts[-1].isdigit()}  # fmt: skip


def _merged(module: nn.Module) -> nn.Module:
    """A plain layer: a copy of this one with its adapter added to its weights."""
    if isinstance(module, Int4Linear):
        return module.dense()
    if (whole := getattr(module, "modules_to_save", None)) is not None:
        return whole[module.active_adapter]  # type: ignore[no-any-return]
    layer: Any = copy.deepcopy(module)
    layer.__dict__.pop("forward", None)
    for part in reversed([part for part in layer.modules() if hasattr(part, "_disable_adapters")]):
        if isinstance(base := getattr(part, "base_layer", None), Int4Linear):
            part.base_layer = base.dense()
        if hasattr(part, "merge"):
            part.merge()
    layer = getattr(layer, "token_adapter", layer)
    return layer.get_base_layer()  # type: ignore[no-any-return]


def without_adapters(model: nn.Module) -> Any:
    """A copy of a transformers model, not trained yet, as it was before it got them."""
    plain = copy.deepcopy(_inner(model))
    for name, changed in _changed(plain).items():
        layer: Any = getattr(changed, "original_module", None) or changed
        layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        plain.set_submodule(name, layer.dense() if isinstance(layer, Int4Linear) else layer)
    del plain.peft_config
    plain._hf_peft_config_loaded = False
    return plain


def _changed(model: nn.Module) -> dict[str, nn.Module]:
    """The modules in 4 bits or with adapters, but for those inside of another."""
    changed: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # outer ones come first
        is_changed = isinstance(module, Int4Linear) or hasattr(module, "_disable_adapters")
        if is_changed and not name.startswith(tuple(f"{outer}." for outer in changed)):
            changed[name] = module
    return changed


def _inject(model: Any, config: Any, name: str, dtype: torch.dtype) -> None:
    from peft import inject_adapter_in_model

    before = set(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # which peft sets itself
        inject_adapter_in_model(config, model, adapter_name=name)
    for weight in set(model.parameters()) - before:
        weight.data = weight.data.to(dtype)
    model._hf_peft_config_loaded = True  # its own `save_pretrained` writes the adapters


def _inner(model: Any) -> Any:
    return getattr(model, "backbone", model)
