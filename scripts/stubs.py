"""Write what type checkers and editors cannot see in the source: an `__init__.pyi` of the public names that
are imported when they are first used; and `verl/keywords.pyi`, the keywords of public constructors, which are fields of
records.

    python scripts/stubs.py [--check]

Nothing imports the stubs at run time.
"""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from pydantic import BaseModel, BeforeValidator

import verl
from verl.algorithms import algorithm_names, make_algorithm
from verl.models.options import ModelOptions
from verl.roles.settings import KEYWORDS, OF_FILES
from verl.roles.workers import BuiltWorker
from verl.rollout.options import RolloutOptions
from verl.trainer.options import OTHERS, RECORDS
from verl.training.options import OptimConfig, TrainOptions

FOLDER = Path(verl.__file__).parent
#: Packages whose names are imported when they are first used.
PACKAGES = ("verl", "verl.data", "verl.dataflow", "verl.models", "verl.utils")
_HEAD = '"""{}, for type checkers: made by `python scripts/stubs.py`."""\n'


class Stub:
    """The text of the stub, and the imports of the names in it."""

    def __init__(self) -> None:
        self.imports: dict[str, set[str]] = {"typing": {"TypedDict"}}
        self.classes: list[str] = []

    def named(self, module: str, name: str) -> str:
        if module != "builtins":
            self.imports.setdefault(module, set()).add(name)
        return name

    def text(self, hint: Any) -> str:
        """A type as it is written in the stub; bounds and validators are not."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any or hint is inspect.Parameter.empty:
            return self.named("typing", "Any")
        if hint in (None, NoneType):
            return "None"
        if origin is typing.Annotated:
            is_free = any(isinstance(each, BeforeValidator) for each in hint.__metadata__)  # other names are taken
            return "str" if is_free and typing.get_origin(arguments[0]) is typing.Literal else self.text(arguments[0])
        if origin in (typing.Union, UnionType):
            branches = list(dict.fromkeys(map(self.text, arguments)))
            return "Any" if "Any" in branches else " | ".join(sorted(branches, key=lambda branch: branch == "None"))
        if origin is typing.Literal:
            return f"{self.named('typing', 'Literal')}[{', '.join(map(repr, arguments))}]"
        if origin is tuple:
            return f"{self.named('collections.abc', 'Sequence')}[{self.text(arguments[0])}]"
        if origin is collections.abc.Callable or hint is Callable:
            inner = [*arguments] or [..., Any]
            taken = "..." if inner[0] is ... else f"[{', '.join(map(self.text, inner[0]))}]"
            return f"{self.named('collections.abc', 'Callable')}[{taken}, {self.text(inner[-1])}]"
        kind = origin or hint
        if not isinstance(kind, type):
            return self.named("typing", "Any")
        name = self.named(kind.__module__, kind.__name__)
        return f"{name}[{', '.join(map(self.text, arguments))}]" if arguments else name

    def add(self, name: str, base: str, hints: Mapping[str, Any]) -> None:
        lines = [f"class {name}({base}, total=False):"]
        lines += [f"    {key}: {self.text(hint)}" for key, hint in hints.items()]
        self.classes.append("\n".join(lines))

    def __str__(self) -> str:
        imports = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(self.imports.items())]
        return (
            _HEAD.format("Keywords of public constructors")
            + "\n"
            + "\n".join(imports)
            + "\n\n"
            + "\n\n".join(self.classes)
            + "\n"
        )


def signature(call: Callable[..., Any], *but: str) -> dict[str, Any]:
    """The hints of what a constructor takes by name, but for its own `but`."""
    function = inspect.unwrap(call)

    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> Any:  # imported for type checkers alone
            return Any

    names = Names({**vars(builtins), **function.__globals__})
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ("self", *but)]
    return {p.name: eval(p.annotation, {}, names) for p in named}


def handle(*records: type[BaseModel]) -> dict[str, Any]:
    """The fields that a handle takes as keywords."""
    hints: dict[str, Any] = {}
    for name, field in [item for record in records for item in record.model_fields.items()]:
        hint: Any = typing.Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        kinds = typing.get_args(hint) or (hint,)
        is_record = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
        hints[name] = hint | Mapping[str, Any] if is_record else hint
    hints |= {name: hints[field] for name, field in KEYWORDS.items() if field in hints and name not in hints}
    return {name: hint for name, hint in hints.items() if name not in OF_FILES}


def public_names(package: str) -> str:
    """A re-export of each name: of a plain import type checkers say that the package does not export it."""
    modules: dict[str, list[str]] = {}
    for name, module in import_module(package).HOMES.items():
        modules.setdefault(module, []).append(f"{name} as {name}")
    lines = [f"from {module} import {', '.join(names)}" for module, names in sorted(modules.items())]
    version = ["", "__version__: str"] if package == "verl" else []
    return "\n".join([_HEAD.format(f"The public names of `{package}`"), *lines, *version, ""])


def keywords() -> str:
    made = Stub()
    options: dict[str, list[Any]] = {}
    for kind in (type(make_algorithm(name)) for name in algorithm_names()):
        hints = typing.get_type_hints(kind)
        for field in (field for field in fields(kind) if field.init):
            options.setdefault(field.name, []).append(hints[field.name])
    made.add("AlgorithmKeywords", "TypedDict", {k: reduce(or_, options[k]) for k in sorted(options)})
    critic = handle(ModelOptions, TrainOptions, OptimConfig)
    actor = handle(ModelOptions, TrainOptions, OptimConfig, RolloutOptions)
    made.add("CriticKeywords", "TypedDict", critic)
    made.add("ActorKeywords", "CriticKeywords", {k: hint for k, hint in actor.items() if k not in critic})
    made.add("ActorArguments", "ActorKeywords", signature(verl.Actor.__init__, "model", "tokenizer"))
    own = signature(BuiltWorker.__init__, "model_path", "tokenizer")
    made.add("BuiltArguments", "ActorArguments", own)
    arguments = signature(verl.Trainer.__init__, "actor", "critic", "reward")
    flat = {
        name: field.annotation for record in RECORDS.values() for name, field in record.model_fields.items()
    } | OTHERS
    made.add("TrainerKeywords", "AlgorithmKeywords", {k: hint for k, hint in flat.items() if k not in arguments})
    made.add("TrainerArguments", "TrainerKeywords", arguments)
    return str(made)


def main() -> None:
    stubs = {FOLDER / "keywords.pyi": keywords()}
    for package in PACKAGES:
        stubs[FOLDER.joinpath(*package.split(".")[1:], "__init__.pyi")] = public_names(package)
    for file, stub in stubs.items():
        if "--check" not in sys.argv[1:]:
            file.write_text(stub, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != stub:
            sys.exit(f"{file} is not what the package says: run python scripts/stubs.py")


if __name__ == "__main__":
    main()
