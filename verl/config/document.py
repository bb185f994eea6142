"""The schema for people: keys with type, default and meaning, as commented YAML or as a Markdown table."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from verl.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One setting. `later` says why nothing but the default is accepted yet, if that is so."""

    path: str
    type: str
    default: Any
    description: str
    later: str | None


def describe(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """All keys of the schema, depth first, in the order in which they are declared."""
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            yield from describe(inner, f"{prefix}{name}.")
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        later = extra.get("later")
        yield Key(
            path=prefix + name,
            type=in_words(field.annotation),
            default=_default(field),
            description=field.description or "",
            later=str(later) if later is not None else None,
        )


def commented_yaml() -> str:
    """The whole tree of defaults as YAML, each key with its meaning; a recipe needs only what differs."""
    lines: list[str] = []
    _write_section(Config, 0, lines)
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The keys as a Markdown table."""
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in describe():
        meaning = key.description + (f" (only the default so far: {key.later})" if key.later else "")
        cells = (f"`{key.path}`", key.type, f"`{_value(key.default)}`", meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def in_words(annotation: Any) -> str:
    """What a setting of this type takes, in plain words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return in_words(arguments[0])
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(argument) for argument in arguments)
    if origin is tuple:
        many = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{many}, each item {in_words(arguments[0])}"
    if _section(annotation) is not None:
        return "a group of settings"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
    return "null" if annotation is type(None) else names[origin or annotation]


def annotation_at(path: tuple[str, ...]) -> Any:
    """The type of the setting at `path`, or None when the schema does not fix one."""
    here: Any = Config
    for part in path:
        section = _section(here)
        if section is not None and part in section.model_fields:
            here = section.model_fields[part].annotation
        elif typing.get_origin(here) is dict:
            here = typing.get_args(here)[1]
        else:
            return None
    return None if here is Any else here


def subsections(path: tuple[str, ...]) -> list[str]:
    """The names that are valid right below `path`."""
    section = _section(annotation_at(path))
    return list(section.model_fields) if section is not None else []


def _section(annotation: Any) -> type[BaseModel] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True) if not field.is_required() else None


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        return json.dumps(value)
    return str(value)


def _write_section(section: type[BaseModel], depth: int, lines: list[str]) -> None:
    for name, field in section.model_fields.items():
        inner, indent = _section(field.annotation), "  " * depth
        if inner is not None:
            lines.append(f"{indent}{name}:  # {field.description}")
            _write_section(inner, depth + 1, lines)
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        note = "; only this value so far" if "later" in extra else f" [{in_words(field.annotation)}]"
        setting = f"{indent}{name}: {_value(_default(field))}"
        lines.append(f"{setting:<44}  # {field.description}{note}")
    if section.model_config.get("extra") == "allow":
        lines.append("  " * depth + "# ... and the algorithm's own options")
