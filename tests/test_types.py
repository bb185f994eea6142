"""What type checkers know of the package: the keywords of constructors, and the public names. What they refuse is in
`typed_calls.py`, which mypy reads."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import verl
from verl.roles.settings import ACTOR_KEYWORDS, KEYWORDS, OF_FILES

SCRIPT = Path(__file__).parents[1] / "scripts" / "stubs.py"


def test_the_stubs_are_made_from_the_records_and_the_public_names() -> None:
    run = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_handle_takes_each_field_of_its_records_once() -> None:
    """By its arguments or as a keyword; the others are of files, or of trainers."""
    of_files = {"path", "name", "url", "n", "num_rollout_workers", "max_rollout_workers", "transport"}
    assert of_files == OF_FILES - named(verl.Actor)
    assert not ACTOR_KEYWORDS & named(verl.Actor) and KEYWORDS.keys() <= ACTOR_KEYWORDS


@pytest.mark.parametrize("handle", [verl.Actor, verl.Critic])
def test_a_handle_has_at_most_14_named_arguments(handle: type) -> None:
    assert len(named(handle)) <= 14


def named(call: type) -> set[str]:
    parameters = inspect.signature(call).parameters.values()
    return {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}


def test_every_public_name_is_exported_to_type_checkers() -> None:
    """`X as X`: of a plain import they say that the package does not export it."""
    tree = ast.parse(Path(verl.__file__).with_name("__init__.pyi").read_text())
    known = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(n.name for n in known if n.asname == n.name) == sorted({*verl.__all__} - {"__version__"})
