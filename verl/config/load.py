"""From a YAML file and `key=value` overrides to a checked `Config`, with errors a person can act on."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from verl.config.document import annotation_at, describe, in_words, subsections
from verl.config.schema import OTHER_NAMES, Config
from verl.errors import ConfigError, nearest

_LIMITS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}
#: Where each key was written: "recipe.yaml line 3" or "override 'a.b=1'".
Places = dict[tuple[str, ...], str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The settings of the YAML file `path` with `key=value` overrides; `${...}` refers to other keys.

    Raises:
        ConfigError: the file is missing or no YAML, or a setting is unknown, of the wrong type or contradicts
            another; each is named with its full key and place.
    """
    path = Path(path)
    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content: Any = OmegaConf.create(text) if root is not None else OmegaConf.create()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}") from None
    except OmegaConfBaseException as error:  # such as a key that is null
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} must hold settings as 'key: value', not a list or a single value")
    places: Places = dict(_key_lines(root, path)) if root is not None else {}
    try:
        for override in overrides:
            key, change = _override_key(override), _override(override)
            content = OmegaConf.merge(content, change)
            written = _paths(OmegaConf.to_container(change), ())
            places.update((place, f"override '{override}'") for place in written if place[: len(key)] == key)
        plain = OmegaConf.to_container(content, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    assert isinstance(plain, dict)
    return build_config({str(key): value for key, value in plain.items()}, places, origin=str(path))


def build_config(content: Mapping[str, Any], places: Places | None = None, origin: str = "config") -> Config:
    """The settings in nested mappings, checked; `places` says where each key was written, for the messages.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or contradicts another.
    """
    places = dict(places or {})
    content = _under_own_names(content, places, origin)
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems: dict[tuple[str, ...], str] = {}
        for details in error.errors(include_url=False):
            path = _given_path(details, content)
            message = f"{'.'.join(path) or 'settings'}: {_problem(details, path)}"
            problems.setdefault(path, message + _places(details, path, places))
        lines = list(problems.values())
    listing = lines[0] if len(lines) == 1 else f"{len(lines)} problems\n  " + "\n  ".join(lines)
    raise ConfigError(f"{origin}: {listing}")


def _under_own_names(content: Mapping[str, Any], places: Places, origin: str) -> dict[str, Any]:
    """The settings with every key under the schema's own name, and `places` likewise."""
    renamed = copy.deepcopy(dict(content))
    for path, own in OTHER_NAMES.items():
        section: Any = renamed
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or path[-1] not in section:
            continue
        if own in section:
            key, other = ".".join((*path[:-1], own)), _place(path, places)
            raise ConfigError(f"{origin}: {key}: is given twice, as {path[-1]} too{other}: leave one out")
        section[own] = section.pop(path[-1])
        if path in places:
            places[(*path[:-1], own)] = places.pop(path)
    return renamed


def to_yaml(config: Config) -> str:
    """All settings as YAML that `load_config` reads back to the same."""
    content = _escaped(config.model_dump(mode="json"))
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [str(f) for f in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        hint = f"; {nearest(str(path), beside)}" if beside else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return str(error).splitlines()[0]


def _key_lines(node: yaml.Node, path: Path, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*prefix, str(key.value))
            yield place, f"{path.name} line {key.start_mark.line + 1}"
            yield from _key_lines(value, path, place)


def _paths(value: Any, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of all keys in nested mappings."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield (*prefix, str(key))
        yield from _paths(item, (*prefix, str(key)))


def _override_key(override: str) -> tuple[str, ...]:
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key) or key.startswith("-"):
        raise ConfigError(f"'{override}' is no override: write key=value, such as trainer.total_steps=20")
    return tuple(key.split("."))


def _override(override: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        told = _yaml_problem(error) if isinstance(error, yaml.YAMLError) else str(error).splitlines()[0]
        raise ConfigError(f"override '{override}': its value is no YAML: {told}; put quotes around a text") from None


def _given_path(details: ErrorDetails, content: Mapping[str, Any]) -> tuple[str, ...]:
    """The key that an error is about, without what pydantic adds for the branches of a union."""
    path: list[str] = []
    here: Any = content
    for part in map(str, details["loc"]):
        if isinstance(here, Mapping) and part in here:
            path.append(part)
            here = here[part]
    if details["type"] == "missing":
        path.append(str(details["loc"][-1]))
    if details["type"] == "key":
        path += details["ctx"]["key"].split(".")
    return tuple(path)


def _problem(details: ErrorDetails, path: tuple[str, ...]) -> str:
    kind = details["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key; {_nearest_key(path, details['input'])}"
    if kind == "missing":
        return "is missing"
    if kind in ("key", "several"):
        return str(details["ctx"]["message"])
    if kind == "value_error":
        return details["msg"].removeprefix("Value error, ")
    given = _shown(details["input"])
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind].format(**details['ctx'])}, not {given}"
    annotation = annotation_at(path)
    expected = in_words(annotation) if annotation is not None else details["msg"]
    return f"must be {expected}, not {given}"


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _place(path: tuple[str, ...], places: Places) -> str:
    below = [told for place, told in places.items() if path and place[: len(path)] == path]
    above = (places[path[:length]] for length in range(len(path), 0, -1) if path[:length] in places)
    last = (told for told in reversed(below) if told.startswith("override"))
    told = next(chain(last, above, below), None)
    return "" if told is None else f" ({told})"


def _places(details: ErrorDetails, path: tuple[str, ...], places: Places) -> str:
    """Where the key was written; of several that exclude each other, where each was."""
    if details["type"] != "several":
        return _place(path, places)
    keys = details["ctx"]["keys"].split()
    return f", not {' and '.join(key + _place((*path, key), places) for key in keys)}; KEY=null takes one out"


def _nearest_key(path: tuple[str, ...], given: Any = None) -> str:
    """The nearest valid key: of a group the keys that end like its own, then a like sibling, else the same or a like
    name anywhere, else all siblings."""
    ends = [".".join((path[-1], *inner)) for inner in _paths(given, ())]
    if longer := [key.path for key in describe() if any(key.path.endswith(f".{end}") for end in ends)]:
        return "did you mean " + " or ".join(f"'{key}'" for key in longer) + "?"
    siblings = subsections(path[:-1])
    if close := difflib.get_close_matches(path[-1], siblings, n=1):
        return f"did you mean '{'.'.join((*path[:-1], close[0]))}'?"
    keys = [key.path for key in describe()]
    if same := [key for key in keys if key.rsplit(".", 1)[-1] == path[-1]]:
        return "did you mean " + " or ".join(f"'{key}'" for key in same) + "?"
    if close := difflib.get_close_matches(path[-1], [key.rsplit(".", 1)[-1] for key in keys], n=1, cutoff=0.75):
        return f"did you mean '{next(key for key in keys if key.endswith('.' + close[0]))}'?"
    return nearest(path[-1], siblings)


def _escaped(value: Any) -> Any:
    """`value` with each `${` in a text marked as no reference."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
