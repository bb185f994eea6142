"""Flags of OpenRLHF 0.11 as settings of ours.

    python -m verl.compat.openrlhf [SCRIPT] FLAGS > recipe.yaml

SCRIPT is train_ppo_ray (the default), train_sft, train_dpo or train_rm; a whole command is taken too, such as
`deepspeed --module openrlhf.cli.train_dpo FLAGS`. Prints YAML for `verl train`, with what differs in comments. Flags
without a meaning here end it with an error that names each, and what to write. The table is `openrlhf.yaml` in
this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from verl.algorithms import make_algorithm
from verl.config import build_config
from verl.errors import ConfigError, VerlError

_TABLE = Path(__file__).with_suffix(".yaml")
_SCRIPT = "openrlhf.cli."


def translate(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings by dotted key, and notes on what differs, of the words of a command.

    Raises:
        ConfigError: a flag is unknown, or has no meaning here; all are named.
    """
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    begin = max((i for i, word in enumerate(words) if _SCRIPT in word), default=0)  # behind `deepspeed --module`, ...
    words = words[begin:]
    starts = [i for i, word in enumerate(words) if word.startswith("--")] or [len(words)]
    named = [word.rpartition(_SCRIPT)[2] for word in words[: starts[0]] if _SCRIPT in word or word.startswith("train_")]
    known = [name for name, entry in table.items() if "flags" in entry]
    if unknown := [name for name in named if name not in known]:
        raise ConfigError(f"nothing here takes the place of OpenRLHF's {unknown[0]}; there are {', '.join(known)}")
    script = table[named[-1] if named else "train_ppo_ray"]
    values: dict[str, Any] = {}
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        if start < end:
            name, equals, value = words[start][2:].partition("=")
            items = [
                OmegaConf.from_dotlist([f"x={word}"]).x for word in ([value] if equals else words[start + 1 : end])
            ]
            values[table["former"].get(name, name)] = True if not items else items[0] if len(items) == 1 else items
    settings, refusals = dict(script["settings"]), []
    for name, value in {**script["defaults"], **values}.items():
        try:
            settings |= _ours(name, value, script["flags"])
        except ConfigError as error:
            refusals.append(f"--{name}: {error}")
    if refusals:
        raise ConfigError("\n  ".join(refusals))
    return _fitting(settings, values), [text for name, text in script["notes"].items() if name not in values]


def _ours(name: str, value: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """What one flag sets."""
    if name not in flags:
        close = "".join(f": did you mean --{each}?" for each in get_close_matches(name, flags, 1))
        raise ConfigError(f"OpenRLHF 0.11 has no such flag{close}")
    to = flags[name]
    if isinstance(to, dict) and "each" in to:
        if not isinstance(value, list) or len(value) != len(to["each"]):
            raise ConfigError(f"takes {len(to['each'])} values, not {value}")
        return dict(zip(to["each"], value, strict=True))
    if not isinstance(to, dict):
        return dict.fromkeys([to] if isinstance(to, str) else to or (), value)
    if "unless" in to and value == to["unless"]:
        return {}
    if "refused" in to:
        raise ConfigError(to["refused"])
    if "values" in to and not (value in to["values"] or "others" in to):
        raise ConfigError(to.get("why", f"'{value}' is not here: write {' or '.join(map(str, to['values']))}"))
    value = to["to"] if "to" in to else to["values"].get(value, value) if "values" in to else value
    if "replace" in to:
        value = value.replace(*to["replace"])
    if "list" in to and not isinstance(value, list):
        value = str(value).split(",")
    return {to["key"]: value, **to.get("with", {})} if to["key"] else {}


def _fitting(settings: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Without what belongs to parts that the algorithm does not have: OpenRLHF does not read it either."""
    algorithm = make_algorithm(settings["algorithm.name"])
    options = {"name", *(field.name for field in fields(algorithm))}
    if not settings.get("algorithm.kl_coef", 1):
        settings["algorithm.kl_in"] = "none"
    if len(url := settings.get("reward.url", ())) == 1 and url[0].endswith(".py"):
        settings["reward.path"] = f"{settings.pop('reward.url')[0]}:reward_func"
    if "ds.lora.rank" not in values:
        settings = {key: value for key, value in settings.items() if "lora" not in key}
    return {
        key: value
        for key, value in settings.items()
        if (not key.startswith("algorithm.") or key.partition(".")[2] in options)
        and (not key.startswith("critic.") or "critic" in algorithm.roles)
    }


def main() -> None:
    if {"-h", "--help"} & {*sys.argv[1:2]} or not sys.argv[1:]:
        sys.exit(__doc__)
    try:
        settings, notes = translate(sys.argv[1:])
        content = OmegaConf.create()
        for key, value in settings.items():
            OmegaConf.update(content, key, value)
        build_config(OmegaConf.to_container(content))  # type: ignore[arg-type]
    except VerlError as error:
        sys.exit(f"error: {error}")
    print("".join(f"# {note}\n" for note in notes) + OmegaConf.to_yaml(content), end="")


if __name__ == "__main__":
    main()
