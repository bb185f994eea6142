"""What type checkers know of the package: the keywords of a handle, and the public names. What they refuse stands in
`typed_calls.py`, which mypy reads."""

from __future__ import annotations

import ast
import inspect

import pytest

import verl
from tests.package import modules
from verl.models.options import ModelOptions
from verl.roles.keywords import ActorArguments, ActorKeywords, CriticKeywords
from verl.roles.settings import KEYWORDS
from verl.roles.workers import BuiltArguments, BuiltWorker
from verl.rollout.options import RolloutOptions
from verl.training.options import OptimConfig, TrainOptions

#: Fields that arguments of a handle or of a trainer stand for.
ELSEWHERE = {"path", "name", "url", "n", "num_rollout_workers", "max_rollout_workers", "transport"}


def test_typed_keywords_are_the_fields_of_the_records() -> None:
    """Beside those that are named arguments, such as `optim` and `strategy`."""
    aliases = {name for name, field in KEYWORDS.items() if field not in RolloutOptions.model_fields}
    trained = aliases.union(*(record.model_fields for record in (ModelOptions, TrainOptions, OptimConfig)))
    every = trained.union(KEYWORDS, RolloutOptions.model_fields)
    assert every - ELSEWHERE - named(verl.Actor) == ActorKeywords.__optional_keys__
    assert trained - ELSEWHERE - named(verl.Critic) == CriticKeywords.__optional_keys__
    passed_on = ActorArguments.__optional_keys__ - ActorKeywords.__optional_keys__
    assert passed_on == named(verl.Actor) - {"model", "tokenizer"}
    built = BuiltArguments.__optional_keys__ - ActorArguments.__optional_keys__
    assert built == named(BuiltWorker) - {"model_path", "tokenizer"}


@pytest.mark.parametrize("handle", [verl.Actor, verl.Critic])
def test_a_handle_has_at_most_14_named_arguments(handle: type) -> None:
    assert len(named(handle)) <= 14


def named(call: type) -> set[str]:
    parameters = inspect.signature(call).parameters.values()
    return {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}


def test_every_public_name_is_exported_to_type_checkers() -> None:
    """`X as X`: of a plain import they say that the package does not export it."""
    _, tree = modules()["__init__.py"]
    known = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(n.name for n in known if n.asname == n.name) == sorted({*verl.__all__} - {"__version__"})
