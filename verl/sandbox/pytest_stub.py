"""What tests use of pytest, inside the sandbox, where it is not installed: raises, approx, parametrize."""

from __future__ import annotations

import re
from numbers import Number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class raises:  # noqa: N801  pytest's name
    """A block that must raise one of these errors; `value` is the error."""

    def __init__(self, kinds: Any, match: str = "") -> None:
        self.kinds, self.match = kinds, match

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert kind is not None, f"did not raise {self.kinds}"
        assert not issubclass(kind, self.kinds) or re.search(self.match, str(error)), f"{error} is not {self.match}"
        self.value = error
        return issubclass(kind, self.kinds)


class approx:  # noqa: N801  pytest's name
    """Equal to a number, or to a list, tuple or dict of numbers, within a tolerance."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.nan_ok = expected, nan_ok
        self.rel = rel if rel is not None else 0.0 if abs is not None else 1e-6
        self.abs = abs if abs is not None else 1e-12

    def __eq__(self, actual: object) -> bool:
        return self._equal(self.expected, actual)

    def _equal(self, one: Any, two: Any) -> bool:
        if isinstance(one, dict) and isinstance(two, dict):
            return one.keys() == two.keys() and all(self._equal(one[key], two[key]) for key in one)
        if hasattr(one, "__len__") and hasattr(two, "__len__") and not isinstance(one, str):
            return len(one) == len(two) and all(map(self._equal, one, two))
        if not isinstance(one, Number) or not isinstance(two, Number):
            return bool(one == two)
        number: Any = one
        other: Any = two
        if number != number:
            return self.nan_ok and other != other
        return bool(number == other or abs(number - other) <= max(self.rel * abs(number), self.abs))


class _Mark:
    def parametrize(self, names: Any, values: Any, **options: Any) -> Callable[[Any], Any]:
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(function: Any) -> Any:
            cases = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]
            function.cases = [*getattr(function, "cases", []), cases]
            return function

        return decorate

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: args[0] if args and callable(args[0]) else lambda function: function


mark = _Mark()


def main(*args: Any) -> int:
    return 0


def __getattr__(name: str) -> Any:
    raise ImportError(f"the tests need pytest.{name}, which is not here")
