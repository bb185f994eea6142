"""Typed records of settings: the sections of a YAML file, and what constructors take. Imported without torch."""

from __future__ import annotations

import difflib
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self, Union

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from verl.errors import ConfigError, nearest, shown

_LIMITS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "a text that is not empty",
}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
}
_WORDS |= {type(None): "null", Callable: "a function", Mapping: "a mapping", Sequence: "a list", Iterable: "a list"}


#: Before the type of a field that is a tuple: YAML has lists, and one text stands for a list of one.
AsTuple = BeforeValidator(
    lambda value: (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
)
Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
#: Numbers that can be squared and summed: what is larger is a mistake, and its results would not be finite.
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
#: A share of which nothing would be none at all.
Portion = Annotated[float, Field(gt=0, le=1)]
#: Of what a user registers.
Name = Annotated[str, Field(min_length=1)]
Retries = Annotated[int, Field(ge=0, le=100)]
#: Shares by name, in any unit.
Weights = Annotated[Mapping[str, NotNegative], Field(min_length=1)]
#: Upper bound: what timers of the operating system can wait for.
Seconds = Annotated[float, Field(gt=0, le=1e6)]


#: Samples of a step at most.
MOST_AT_ONCE = 1_000_000


def _at_once(value: int) -> int:
    if value > MOST_AT_ONCE:
        raise ValueError(f"must be at most {MOST_AT_ONCE:,}: all of them are held in memory at once")
    return value


#: Prompts of a step, or samples of a prompt.
AtOnce = Annotated[int, Field(ge=1, lt=2**63), AfterValidator(_at_once)]


def matching(value: str, pattern: str, rule: str) -> str:
    """A text as it is.

    Raises:
        ValueError: it does not match the pattern; `rule` says in words what it must be.
    """
    if not re.fullmatch(pattern, value):
        raise ValueError(f"must be {rule}, not '{value}'")
    return value


def function_path(value: str) -> str:
    """FILE.py:NAME of a user's function or class."""
    file, _, function = value.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ValueError(f"must be FILE.py:FUNCTION, such as rewards.py:score, not '{value}'")
    return os.path.expanduser(value)  # a shell does so only where a word begins with ~


#: What a setting changes, stated where it is defined: losses or samples; what they cost, and no more than their
#: rounding; what is written or shown; what is refused, or when something ends.
Change = Literal["result", "cost", "output", "limit"]


def _field(changes: Change, default: Any = ..., description: str = "", **options: Any) -> Any:
    """A field of a record.

    Args:
        **options: bounds, and `free`: it does not change the numbers of a run but by rounding, or only their end;
            `added`: earlier versions have it not, and its default means what they do: at it, a run of theirs goes on;
            `later`, why only the default is accepted so far: better refused than read and ignored.
    """
    notes: dict[str, Any] = {"changes": changes}
    notes |= {name: options.pop(name) for name in ("free", "added", "later") if name in options}
    return Field(default, description=description, json_schema_extra=notes, **options)


result: Any = partial(_field, "result")
cost: Any = partial(_field, "cost")
output: Any = partial(_field, "output")
limit: Any = partial(_field, "limit")


FunctionPath = Annotated[str, AfterValidator(function_path)]
Strings = Annotated[tuple[Name, ...], AsTuple]
#: Steps that a sample may be behind: prompts and samples of each are held.
Staleness = Annotated[int, Field(ge=0, le=1000)]
#: Processes of one kind: more are a mistake that would bring any machine down.
Processes = Annotated[int, Field(ge=1, le=1024)]


Problem = tuple[tuple[str, ...], str, ErrorDetails]


class SettingsError(ConfigError):
    """Settings that a record refuses.

    Attributes:
        problems: for each wrong setting its path, what is wrong, and pydantic's own details.
    """

    def __init__(self, owner: str, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{'.'.join((owner, *path))}: {text}" for path, text, _ in problems))
        self.problems = problems


def extra(field: FieldInfo, name: str) -> Any:
    """A field's note "changes", "free", "added" or "later"; None: not set."""
    noted = field.json_schema_extra
    return noted.get(name) if isinstance(noted, dict) else None


class Record(BaseModel):
    """A group of settings: frozen, strictly typed (`true` is no number, text no truth), without unknown names.

    Raises:
        SettingsError: (a `ConfigError`) when it is made with a setting that is unknown, of the wrong type or out of
            range, or that contradicts another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise SettingsError(type(self).__name__, problems_of(type(self), error)) from None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        for name, field in type(self).model_fields.items():
            reason = extra(field, "later")
            if reason is not None and getattr(self, name) != field.default:
                only = json.dumps(field.default).strip('"')
                raise wrong(name, f"{reason}, so only {only} is possible here")
        self._check()
        return self

    def _check(self) -> None:
        """For a record to refuse settings that contradict each other, by `wrong`."""

    @classmethod
    def of(cls, settings: Any, name: str) -> Self:
        """The argument `name`: a record as it is, one made of a mapping of its fields, or the defaults for None."""
        if isinstance(settings, cls):
            return settings
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(f"{name} is a {cls.__name__} or a mapping of its fields, not {shown(settings)}")
        try:
            return cls(**{str(key): value for key, value in (settings or {}).items()})
        except SettingsError as error:
            raise SettingsError(name, error.problems) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed, checked as a new one is."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


def wrong(key: str, message: str) -> PydanticCustomError:
    """The error about the setting `key`, for a validator of its section to raise."""
    return PydanticCustomError("key", "{key}: {message}", {"key": key, "message": message})


def in_words(annotation: Any) -> str:
    """The values of this type, in plain words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return in_words(arguments[0])
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(argument) for argument in arguments)
    if origin is tuple:
        many = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{many}, each item {in_words(arguments[0])}"
    if section(annotation) is not None:
        return "a group of settings"
    return _WORDS.get(origin or annotation) or str(getattr(annotation, "__name__", annotation))


def section(annotation: Any) -> type[BaseModel] | None:
    """The record that a field of this type holds, if it holds one."""
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def problems_of(kind: Any, error: ValidationError) -> list[Problem]:
    """The problems of a value of this type, one entry a setting: of the branches of a union only the first."""
    # pydantic reports each branch of a union. The one that got furthest is what the user meant.
    problems: dict[tuple[str, ...], tuple[str, ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        path, annotation = _path(kind, details)
        inner = details.get("ctx", {}).get("error")
        if isinstance(inner, SettingsError):  # a record within this one
            for below, text, more in inner.problems:
                problems.setdefault((*path, *below), (text, more))
        elif path not in problems or len(details["loc"]) > len(problems[path][1]["loc"]):  # a branch fits further
            problems[path] = (_text(kind, details, annotation), details)
    return [(path, *rest) for path, rest in problems.items()]


def _path(here: Any, details: ErrorDetails) -> tuple[tuple[str, ...], Any]:
    """The setting that an error is about and its type, without what pydantic adds for the branches of a union."""
    if details["type"] == "key":
        return tuple(details["ctx"]["key"].split(".")), None
    path: list[str] = []
    for part in map(str, details["loc"]):
        here = typing.get_args(here)[0] if typing.get_origin(here) is Annotated else here
        inside = section(here)
        if inside is not None and (part in inside.model_fields or not path):
            path.append(part)
            here = inside.model_fields[part].annotation if part in inside.model_fields else None
        elif typing.get_origin(here) in (dict, Mapping) and part != "[key]":
            path.append(part)
            here = typing.get_args(here)[1]
        elif typing.get_origin(here) is tuple and part.isdigit():
            path.append(part)
            here = typing.get_args(here)[0]
        elif part.isdigit():  # an item of one branch of a union
            here = None
    return tuple(path), here


def _text(record: Any, details: ErrorDetails, annotation: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        details["ctx"] = {"known": [*getattr(record, "model_fields", ())]}
        return f"unknown key; {nearest(str(details['loc'][-1]), details['ctx']['known'])}"
    if kind == "missing":
        return "is missing"
    if kind in ("key", "several"):
        return str(context["message"])
    if kind == "value_error":
        return details["msg"].removeprefix("Value error, ")
    value = details["input"]
    text_of = json.dumps(value) if value is None or isinstance(value, bool) else shown(value)
    if kind == "too_short":
        least = context["min_length"]
        return f"must have at least {least} item{'s' if least > 1 else ''}, not {text_of}"
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind].format(**context)}, not {text_of}"
    said = details["msg"].removeprefix("Input should be ")
    text = f"must be {in_words(annotation) if annotation not in (None, Any) else said}, not {text_of}"
    close = difflib.get_close_matches(text_of.strip("'"), re.findall("'(.+?)'", context.get("expected", "")), n=1)
    return f"{text}: did you mean '{close[0]}'?" if kind == "literal_error" and close else text
