"""The schema for people: keys with type, default and meaning, as commented YAML or as a page of Markdown."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel

from verl._base.record import extra, in_words, section
from verl._base.schemas import SETTINGS
from verl.config.schema import Config

_SECTION = re.compile(r"actor_rollout_ref\.\w+|\w+")
_PREFACE = """# Settings

Keys stand under their sections. `optim.lr` of `actor_rollout_ref.actor` is `actor_rollout_ref.actor.optim.lr=1e-5` on
the command line; in YAML each word is a level. `verl config` prints the whole tree. The column "changes" says what a
key changes:

- `result`: the losses or samples of a run;
- `cost`: time or memory, and of the numbers no more than their rounding;
- `output`: what is written or shown;
- `limit`: what is refused, or when something ends.
"""


class Key(NamedTuple):
    """One setting. `changes`: see `verl._base.record.Change`. `later` says why nothing but the default is accepted
    yet, if that is so."""

    path: str
    type: str
    default: Any
    description: str
    changes: str
    later: str | None


def describe(record: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """All keys of the schema, depth first, in the order in which they are declared."""
    for name, field in record.model_fields.items():
        inner = section(field.annotation)
        if inner is not None:
            yield from describe(inner, f"{prefix}{name}.")
            continue
        about = (field.description or "", extra(field, "changes"), extra(field, "later"))
        default = None if field.is_required() else field.default
        yield Key(prefix + name, in_words(field.annotation), default, *about)


@cache
def keys() -> tuple[Key, ...]:
    """All keys of a run's settings."""
    return tuple(describe())


def commented_yaml() -> str:
    """The whole tree of defaults as YAML, each key with its meaning; a recipe needs only what differs."""
    version = f"{f'{SETTINGS.key}: {SETTINGS.current}':<44}  # version of the form of this file (none: 1)"
    return "\n".join([version, *_yaml_lines(Config)]) + "\n"


def markdown() -> str:
    """The keys as a page of Markdown, a table a section."""
    lines = [_PREFACE]
    for name, group in itertools.groupby(keys(), lambda key: _SECTION.match(key.path)[0]):  # type: ignore[index]
        lines += [f"## {name}", "", "| key | meaning | takes | default | changes |", "|---|---|---|---|---|"]
        for key in group:
            meaning = key.description + (f" (only the default so far: {key.later})" if key.later else "")
            short = key.path.removeprefix(f"{name}.")
            cells = (f"`{short}`", meaning, key.type, f"`{_value(key.default)}`", key.changes)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def differences(config: Config) -> Iterator[tuple[str, str, str]]:
    """The settings that are not the defaults: key, value and default, in the order of the schema."""
    for key in keys():
        value = attrgetter(key.path)(config)
        if value != key.default:
            yield key.path, _value(value), _value(key.default)


def flat(content: Mapping[str, Any], whole: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings by dotted keys; an empty mapping is one, as is one under a key of `whole`."""
    for key, value in content.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" not in whole:
            yield from flat(value, whole, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | list | tuple | dict | BaseModel):
        return json.dumps(value, default=lambda record: record.model_dump(mode="json", exclude_defaults=True))
    return str(value)


def _yaml_lines(record: type[BaseModel], indent: str = "") -> Iterator[str]:
    for name, field in record.model_fields.items():
        inner = section(field.annotation)
        if inner is not None:
            yield f"{indent}{name}:  # {field.description}"
            yield from _yaml_lines(inner, indent + "  ")
            continue
        note = "; only this value so far" if extra(field, "later") else f" [{in_words(field.annotation)}]"
        default = None if field.is_required() else field.default
        yield f"{f'{indent}{name}: {_value(default)}':<44}  # {field.description}{note}"
    if record.model_config.get("extra") == "allow":
        yield f"{indent}# ... and the algorithm's own options"
