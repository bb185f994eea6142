"""Names of layers in a configuration of adapters: peft takes one that matches nothing without a word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from verl._base.names import check_known

#: The number of a layer in the name of a module, as peft finds it, and the name of the list that holds it.
_NUMBER = re.compile(r".*?([^.]+)\.(\d+)\.")
#: Fields that are lists of names.
_FIELDS = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters", "trainable_token_indices")
#: What peft itself adds to `modules_to_save` of a classifier.
_OF_PEFT = {"classifier", "score"}


def check_layers(setting: str, names: Iterable[str], model: nn.Module) -> None:
    """Raises ConfigError if no module of the model has the name, or ends in it."""
    check_known(f"{setting}: the model has no", names, _ends(_modules(model), names))


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

    modules, weights = _modules(model), [name.replace(".base_layer.", ".") for name, _ in model.named_parameters()]
    for field in _FIELDS:
        value = getattr(config, field, None) or ()  # a text is a pattern, and whole numbers are tokens
        names = [] if isinstance(value, str) else [name for name in value if isinstance(name, str)]
        names = [name for name in names if field != "modules_to_save" or name not in _OF_PEFT]
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
