"""Arguments of Python calls, checked as settings of a file are: by the types and bounds in their hints, with the same
messages. Imported without torch."""

from __future__ import annotations

import builtins
import collections.abc
import functools
import inspect
import numbers
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import AfterValidator, ConfigDict, InstanceOf, PlainValidator, TypeAdapter, ValidationError

from verl._base.keywords import takes
from verl._base.record import Problem, SettingsError, problems_of, section
from verl.errors import ConfigError, nearest

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_SCALARS = (bool, int, float, str, bytes, type(None))
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def checked(function: CallableT, types: bool = True) -> CallableT:
    """Decorator of a function, a constructor or a dataclass: each argument must have the type of its hint, strictly
    (`True` is no number, a number no text, nan no number), and lie within the bounds of an `Annotated` one; an unknown
    keyword is named with the call that takes it, or the nearest name.

    Scalars, tuples of them, literals and records are checked in full; of other classes only that it is one, also of the
    items of a sequence, and hints of names that are imported for type checkers alone say nothing. A list where a tuple
    is wanted, or a mapping where a record is, is turned into one.

    Args:
        types: False: only the names of keywords are checked, for functions that are called too often.

    Raises:
        SettingsError: (a `ConfigError`) on the call, naming every wrong argument.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__, types)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs) if types else None
        except TypeError:
            bound = None  # Python's own message, which the call below has, names the function
        if bound is not None:
            hints = hints_of(function)
            values = {name: value for name, value in bound.arguments.items() if name in hints}
            bound.arguments.update(validated(owner, hints, values))
            args, kwargs = bound.args, bound.kwargs
        try:
            return function(*args, **kwargs)
        except TypeError:
            kinds = {name: parameter.kind for name, parameter in signature.parameters.items() if name != "self"}
            # One that takes any keywords looks at them itself.
            odd = next((name for name in kwargs if name not in kinds), None)
            if odd is None or inspect.Parameter.VAR_KEYWORD in kinds.values():
                raise
        who = owner.rpartition("<locals>.")[2]
        raise ConfigError(f"{who}: there is no argument '{odd}': {takes(odd, who) or nearest(odd, kinds)}")

    return typing.cast(CallableT, call)


def hinted(function: CallableT) -> CallableT:
    """`checked` without types."""
    return checked(function, types=False)


def validated(owner: str, hints: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their hints want them.

    Raises:
        SettingsError: some are not what their hints say; all are named.
    """
    problems: list[Problem] = []
    results = {}
    for name, value in values.items():
        try:
            if not isinstance(value, int | float) and isinstance(value, numbers.Real):  # as of NumPy
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            results[name] = _adapter(hints[name]).validate_python(value)
        except ValidationError as error:
            problems += [((name, *path), text, details) for path, text, details in problems_of(hints[name], error)]
    if problems:
        raise SettingsError(owner, problems)
    return results


@functools.cache
def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What can be checked of each parameter, by name; those that take any number of arguments are left out."""
    names = _Names(function.__globals__)
    return {
        name: _checkable(_evaluated(parameter.annotation, names))
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation is not parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


class _Names(dict[str, Any]):
    """A function's globals, in which a name that only type checkers import stands for any value."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Any


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    try:
        return eval(annotation, {}, names) if isinstance(annotation, str) else annotation
    except (AttributeError, TypeError):  # part of a name that stands for any value
        return Any


def _checkable(hint: Any) -> Any:
    """The hint with all that pydantic would copy or consume replaced by whether it is an instance."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or origin is Literal or hint in _SCALARS:
        return hint
    if section(hint) is not None:
        return Annotated[hint, PlainValidator(functools.partial(hint.of, name=hint.__name__))]
    if origin is Annotated:
        inner = _checkable(arguments[0])
        return Any if inner is Any else operator.getitem(Annotated, (inner, *hint.__metadata__))
    if origin in (Union, types.UnionType):
        branches = [_checkable(argument) for argument in arguments]
        return Any if Any in branches else Union[tuple(branches)]  # noqa: UP007 - of any number
    if origin is tuple or (origin in (collections.abc.Mapping, collections.abc.Sequence) and _are_scalars(arguments)):
        return hint
    if origin is collections.abc.Callable or hint is Callable:
        return Callable
    kind = origin or hint
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return Any
    # pydantic would validate, and so copy, a list or an iterator: whether it is an instance is enough.
    whole = InstanceOf[kind]  # type: ignore[valid-type]
    if origin in (list, collections.abc.Sequence) and (item := _checkable(arguments[0])) not in (Any, Callable):
        return Annotated[whole, AfterValidator(functools.partial(_with_items, item))]
    return whole


def _with_items(hint: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The very sequence, each of whose items is what the hint says."""
    for number, value in enumerate(values):
        try:
            _adapter(hint).validate_python(value)
        except ValidationError as error:
            _, text, _ = next(iter(problems_of(hint, error)))
            raise ValueError(f"item {number}: {text}") from None
    return values


def _are_scalars(hints: tuple[Any, ...]) -> bool:
    for hint in hints:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        inner = arguments[:1] if origin is Annotated else arguments
        if hint not in _SCALARS and not (origin in (Annotated, Union, types.UnionType) and _are_scalars(inner)):
            return False
    return True


_adapter = functools.cache(functools.partial(TypeAdapter[Any], config=_CONFIG))
