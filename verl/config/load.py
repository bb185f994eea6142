"""From a YAML file and `key=value` overrides to a checked `Config`, with errors a person can act on."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl._base.record import Record, SettingsError
from verl._base.schemas import SETTINGS
from verl._base.secrets import masked, masked_settings
from verl.config.document import flat, keys
from verl.config.schema import Config
from verl.config.tasks import TaskConfig, TasksFile
from verl.errors import ConfigError, nearest

#: A recipe has a few kilobytes, and five levels at most below a list of the user's own.
MOST_BYTES, MOST_LEVELS, MOST_NODES = 1 << 20, 50, 100_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first takes a tenth of the time, where PyYAML has it
#: What YAML 1.1 takes for a number in base 8 or 60: 010, 1:30.
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]*[0-7]|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
#: The keys right under `algorithm` that volcengine/verl has and no algorithm here.
OF_OTHERS = ("adv_estimator", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty", "use_pf_ppo")
_OPTION = re.compile(rf"algorithm\.(?!(?:{'|'.join(OF_OTHERS)})$)[^.]*")
RecordT = TypeVar("RecordT", bound=Record)
#: Where each key was written: "recipe.yaml line 3" or "override 'a.b=1'".
Locations = dict[tuple[str, ...], str]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The settings of the YAML file `path` with `key=value` overrides (None: of these alone); `${...}` refers to other
    keys.

    Raises:
        ConfigError: the file is missing or no YAML, or a setting is unknown, of the wrong type or contradicts
            another; each is named with its full key and where it was written.
    """
    content, locations = read_settings(None if path is None else Path(path), overrides)
    return build_config(content, locations, origin="the command line" if path is None else str(path))


def load_tasks(path: str | Path) -> tuple[TaskConfig, ...]:
    """The tasks of a YAML file that holds nothing but `tasks`.

    Raises:
        ConfigError: as of `load_config`.
    """
    content, locations = read_settings(Path(path))
    SETTINGS.check(content.pop(SETTINGS.key, None), str(path) + _where((SETTINGS.key,), locations))
    return _build(TasksFile, content, locations, str(path)).tasks


def read_settings(path: Path | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Locations]:
    """The settings of a YAML file with overrides, unchecked, and where each was written.

    Raises:
        ConfigError: it is missing or no YAML.
    """
    text, path = ("", Path("the command line")) if path is None else (_read(path), path)
    try:
        root = _compose(text, str(path))
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path} must hold settings as 'key: value', not a list or a single value")
        locations: Locations = dict(_key_lines(root, path)) if root is not None else {}
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        for override in overrides:
            change = _override(override)
            content = _merged(content, change)
            locations.update(dict.fromkeys(_paths(change), f"override '{override}'"))
        # References (${...}) are resolved last, so that they see what an override has set.
        content = OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # such as a key twice, or a number of 5,000 digits
        raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}") from None
    except OmegaConfBaseException as error:  # such as a reference to nothing
        raise ConfigError(f"{path}: {_yaml_problem(error)}") from None
    return content, locations


def build_config(content: Mapping[str, Any], locations: Locations | None = None, origin: str = "config") -> Config:
    """The settings in nested mappings, checked; `locations` says where each key was written, for the messages.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or contradicts another.
    """
    locations, settings = dict(locations or {}), copy.deepcopy(dict(content))
    SETTINGS.check(settings.pop(SETTINGS.key, None), origin + _where((SETTINGS.key,), locations))
    if stray := next((path for path in _paths(settings) if not all(isinstance(key, str) for key in path)), None):
        raise ConfigError(f"{origin}: {'.'.join(map(str, stray))}: a key is text, not {stray[-1]!r}")
    ours = tuple(f"{key.path}." for key in keys())
    # The tables of foreign names are large: a file of ours alone does not load them.
    if not all(f"{name}.".startswith(ours) or _OPTION.fullmatch(name) for name, _ in flat(settings)):
        from verl.config.translation import translated

        settings = translated(settings, locations, origin)
    return _build(Config, settings, locations, origin)


def _build(record: type[RecordT], content: Mapping[str, Any], locations: Locations, origin: str) -> RecordT:
    try:
        return record(**content)
    except SettingsError as error:
        lines = [_line(path, text, details, locations) for path, text, details in error.problems]
    listing = lines[0] if len(lines) == 1 else f"{len(lines)} problems\n  " + "\n  ".join(lines)
    raise ConfigError(masked(f"{origin}: {listing}"))


def to_yaml(config: Config) -> str:
    """All settings as YAML that `load_config` reads back to the same, but for credentials, which are masked."""
    content = {SETTINGS.key: SETTINGS.current, **_escaped(masked_settings(config.model_dump(mode="json")))}
    return masked(str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)))


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # opening a pipe or a device may never end
            raise ConfigError(f"{path} cannot be read: it is not a regular file")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES >> 20} MiB: that is no file of settings")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [str(f) for f in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        hint = f"; {nearest(str(path), beside)}" if beside else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None


def _compose(text: str, origin: str) -> yaml.Node | None:
    """The tree of a YAML text.

    Raises:
        ConfigError: it is nested too deeply, or larger than any settings once its aliases are written out; or YAML 1.1
            reads a number in base 8 or 60 where people write it in base 10, or mean a text.
        yaml.YAMLError, ValueError: it is no YAML.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            line = f"{origin}: line {event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_LEVELS:
                raise ConfigError(f"{line}: nested more than {MOST_LEVELS} levels deep")
            if isinstance(event, yaml.ScalarEvent) and not event.style and _OTHER_BASE.fullmatch(event.value):
                number, is_time = event.value, ":" in event.value
                plain = "" if is_time else f"{int(number.replace('_', ''))}, or "
                raise ConfigError(
                    f"{line}: {number} would be {yaml.safe_load(number)}, a number in base {60 if is_time else 8}: "
                    f"write {plain}'{number}' in quotes for a text"
                )
        root = yaml.compose(text, Loader=_LOADER)
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None
    if root is not None and _nodes(root, {}) > MOST_NODES:
        raise ConfigError(f"{origin}: more than {MOST_NODES:,} values, aliases counted each time: leave aliases out")
    return root


def _nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """Nodes below a node with aliases written out; one that holds itself has no end."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        inner = [part for item in below for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_nodes(part, known) for part in inner)
    return known[id(node)]


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None)}"
    return str(error).splitlines()[0]


def _override(override: str) -> dict[str, Any]:
    """The tree of settings that `key=value` stands for."""
    override = override.lstrip("+")  # Hydra's mark of a key that is new
    name, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", name) or name.startswith("-"):
        raise ConfigError(f"'{override}' is no override: write key=value, such as trainer.total_steps=20")
    if (comment := re.search(r"(?:^|\s)#.*", value)) and value.lstrip()[0] not in "'\"[{":
        raise ConfigError(f"override '{name}': {comment[0].strip()!r} would be a comment: put quotes around a text")
    try:
        # OmegaConf has no bound on depth or aliases, so the value goes through the checks of a file first.
        _compose(value, f"override '{name}'")
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]))  # type: ignore[return-value]
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        shown = override if len(override) <= 200 else override[:200] + "..."
        why = _yaml_problem(error)
        raise ConfigError(f"override '{shown}': its value is no YAML: {why}; put quotes around a text") from None


def _merged(settings: Any, change: Any) -> Any:
    """A mapping joins a mapping; anything else takes the earlier value's place."""
    if not isinstance(settings, dict) or not isinstance(change, dict):
        return change
    return {**settings, **{key: _merged(settings.get(key), value) for key, value in change.items()}}


def _key_lines(node: yaml.Node, path: Path, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(number), item, item) for number, item in enumerate(node.value)]
    for name, start, value in items:
        yield (*prefix, name), f"{path.name} line {start.start_mark.line + 1}"
        yield from _key_lines(value, path, (*prefix, name))


def _paths(value: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys in nested mappings."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield (*prefix, key)
        yield from _paths(item, (*prefix, key))


def _line(path: tuple[str, ...], text: str, details: Any, locations: Locations) -> str:
    """One problem: the key, what is wrong, the nearest valid key, where it was written."""
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        text = f"unknown key; {_nearest_key(path, details['ctx']['known'], details['input'])}"
    if details["type"] == "several":
        keys = details["ctx"]["keys"].split()
        text += f", not {' and '.join(key + _where((*path, key), locations) for key in keys)}; KEY=null takes one out"
    else:
        text += _where(path, locations)
    return f"{'.'.join(path) or 'settings'}: {text}"


def _where(path: tuple[str, ...], locations: Locations) -> str:
    above = (path[:length] for length in range(len(path), 0, -1))
    return next((f" ({locations[key]})" for key in above if key in locations), "")


def _nearest_key(path: tuple[str, ...], siblings: list[str], value: Any) -> str:
    """The nearest valid key: of a group the keys that end like its own, then a like sibling, else the same or a like
    name anywhere, else all siblings."""
    ends = [".".join((path[-1], *inner)) for inner in _paths(value)]
    paths = [key.path for key in keys()]
    names = [key.rsplit(".", 1)[-1] for key in paths]
    candidates = (
        [key for key in paths if any(key.endswith(f".{end}") for end in ends)]
        or [".".join((*path[:-1], close)) for close in difflib.get_close_matches(path[-1], siblings, n=1)]
        or [key for key, name in zip(paths, names, strict=True) if name == path[-1]]
        or [paths[names.index(close)] for close in difflib.get_close_matches(path[-1], names, n=1, cutoff=0.75)]
    )
    if not candidates:
        return nearest(path[-1], siblings)
    return "did you mean " + " or ".join(f"'{key}'" for key in candidates) + "?"


def _escaped(value: Any) -> Any:
    """`value` with each `${` in a text marked as no reference."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
