"""Outside `verl/algorithms/`, no code names an algorithm; prose may, and the alias `PPOTrainer` does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.package import PACKAGE, modules
from verl.algorithms import algorithm_names, make_algorithm

#: verl's data sets have a column `reward_model`; a reward that is a model is called so; a task's reward has this key.
OTHER_MEANING = {
    ("config/tasks.py", "reward_model"),
    ("data/tasks.py", "reward_model"),
    ("rewards/signatures.py", "reward_model"),
    ("rewards/maths.py", "reward_model"),
    ("rewards/model.py", "reward_model"),
    ("report/completions.py", "reward_model"),
    ("run/train.py", "reward_model"),
    ("run/data.py", "reward_model"),
    ("trainer/tasks.py", "reward_model"),
}


def mentions(tree: ast.AST) -> Iterator[str]:
    """String constants that are a whole name, and identifiers, of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


@cache
def names() -> frozenset[str]:
    """Of the algorithms of this package, and of their classes."""
    made = {name: type(make_algorithm(name)) for name in algorithm_names()}
    ours = {name: kind for name, kind in made.items() if kind.__module__.startswith("verl.")}
    return frozenset(ours) | {kind.__name__ for kind in ours.values()} - {"RewardModel"}


def found(source: str | ast.Module) -> set[str]:
    return names() & set(mentions(ast.parse(source) if isinstance(source, str) else source))


def test_the_search_finds_names() -> None:
    assert found("if a.name == 'dpo': pass") == {"dpo"}
    assert found("from verl.algorithms import PPO") == {"PPO"} and found("x = algorithms.gspo.y") == {"gspo"}
    assert found("'''ppo is an algorithm'''") == set()


def test_no_code_outside_names_an_algorithm() -> None:
    offenders = set()
    for place, (_, tree) in modules().items():
        # These are nothing but other libraries' names, some of which name an algorithm.
        names_of_others = (*(f"config/{kind}_names.py" for kind in ("other", "sft", "unused")), "config/name_rules.py")
        if not place.startswith(("algorithms/", "trl/", *names_of_others)):
            offenders |= {(place, name) for name in found(tree)}
    # Two classes whose own names say PPO.
    named = {
        "trainer/trainer.py": "class PPOTrainer(Trainer)",
        "roles/role_updater.py": "class PPORoleUpdater(Updater)",
    }
    assert offenders - OTHER_MEANING == {(place, "ppo") for place in named}
    for place, line in named.items():
        before, _, inside = (PACKAGE / place).read_text(encoding="utf-8").partition(line)
        assert found(before) == set() and found(f"{line}{inside}") == {"ppo"}
