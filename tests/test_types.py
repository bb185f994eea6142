"""What a type checker says of user code: calls of workers are followed to their methods."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl
from tests.package import modules

ROOT = Path(__file__).resolve().parents[1]

#: Each line with a comment is an error, whose message is the comment; all others are none.
CODE = '''
import verl
from verl.algorithms.grpo import GRPO
from verl.batch import Batch
from verl.cluster.group import Workers
from verl.cluster.place import dispatch
from verl.roles.handle import ModelHandle
from verl.workers.actor import ActorWorker, ReferenceWorker
from verl.workers.critic import CriticWorker
from verl.workers.trained import TrainedWorker
from verl.workers.update import UpdatePart, UpdatePlan


class Mine(ActorWorker):
    @dispatch("train")
    def more(self, rows: Batch, *, factor: float) -> list[float]:
        return [factor * len(rows)]


def calls(actor: verl.Actor, critic: verl.Critic, handle: ModelHandle, mine: Workers[Mine], rows: Batch) -> None:
    part = UpdatePart(rows, GRPO().objective("actor"))
    metrics: dict[str, float] = actor.group.call(ActorWorker.update, [part], UpdatePlan())
    actor.group.call(ActorWorker.update, [part])  # Missing positional argument "plan"
    actor.group.call(ActorWorker.update, rows, UpdatePlan())  # incompatible type "Batch"
    actor.group.call(ActorWorker.update, [part], plan=UpdatePlan())
    actor.group.call(ActorWorker.update, [part], plans=UpdatePlan())  # Unexpected keyword argument "plans"
    count: int = actor.group.call(ActorWorker.update, [part], UpdatePlan())  # variable has type "int"
    finished: list[int] = [len(group) for group in actor.group.call(ActorWorker.generate, rows, actor.sampling)]
    actor.group.call(CriticWorker.values, rows)  # Callable[[CriticWorker
    actor.group.call(ReferenceWorker.log_probs, rows)  # Callable[[ReferenceWorker
    actor.group.call("update", [part], UpdatePlan())  # incompatible type "str"
    critic.group.call(CriticWorker.values, [rows])  # incompatible type "list[Batch]"
    critic.group.call(TrainedWorker.saved, wait=False)
    handle.group.call(TrainedWorker.saved, wait="yes")  # incompatible type "str"
    numbers: list[float] = mine.call(Mine.more, rows, factor=2.0)
    mine.call(Mine.more, rows, factor="2")  # incompatible type "str"
    mine.call(ActorWorker.sync)
    verl.WorkerGroup(actor).call(ActorWorker.loss, rows)  # expected "UpdatePart"
'''  # fmt: skip


@pytest.mark.slow
def test_what_a_type_checker_refuses(tmp_path: Path) -> None:
    file = tmp_path / "user_code.py"
    file.write_text(CODE)
    command = [sys.executable, "-m", "mypy", "--no-color-output", "--config-file", "pyproject.toml", str(file)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    errors: dict[int, str] = {}
    for line in said.stdout.splitlines():
        if place := re.search(r"user_code\.py:(\d+): error: (.*)", line):
            errors[int(place[1])] = f"{errors.get(int(place[1]), '')} {place[2]}"
    wanted = {number: line.partition("  # ")[2] for number, line in enumerate(CODE.splitlines(), 1) if "  # " in line}
    assert errors.keys() == wanted.keys(), said.stdout + said.stderr
    for number, text in wanted.items():
        assert text in errors[number]


def test_every_public_name_is_exported_to_type_checkers() -> None:
    """`X as X`: of a plain import they say that the package does not export it."""
    _, tree = modules()["__init__.py"]
    known = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(n.name for n in known if n.asname == n.name) == sorted({*verl.__all__} - {"__version__"})
