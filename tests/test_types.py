"""What type checkers know of the package: which method a call of a worker is, which keywords a handle takes."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl
from tests.package import modules
from verl.models.options import ModelOptions
from verl.roles.settings import KEYWORDS, ActorArguments, ActorKeywords, CriticKeywords
from verl.roles.workers import BuiltArguments, BuiltWorker
from verl.rollout.options import RolloutOptions
from verl.training.options import OptimConfig, TrainOptions

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


def calls(actor: verl.Actor, critic: verl.Critic, mine: Workers[Mine], rows: Batch) -> None:
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
    handles: list[ModelHandle[TrainedWorker]] = [actor, critic]
    handles[0].group.call(TrainedWorker.saved, wait="yes")  # incompatible type "str"
    numbers: list[float] = mine.call(Mine.more, rows, factor=2.0)
    mine.call(Mine.more, rows, factor="2")  # incompatible type "str"
    mine.call(ActorWorker.sync)
    verl.WorkerGroup(actor).call(ActorWorker.loss, rows)  # expected "UpdatePart"


def constructors() -> None:
    verl.Actor("x", not_a_setting=1)  # Unexpected keyword argument "not_a_setting"
    verl.Actor("x", lr="fast")  # expected "float"
    verl.Actor("x", lr=1e-5, lora={"r": 8}, stop=".", gradient_checkpointing=True, optim={"weight_decay": 0.1})
    verl.Critic("x", lr=1e-5, train={"epochs": 2}, dtype="bf16")
    verl.Critic("x", max_new_tokens=3)  # Unexpected keyword argument "max_new_tokens"
    actor: verl.Actor = verl.Actor.from_pretrained("x", lr=1e-5, algorithm="ppo")
    verl.Actor.from_pretrained("x", learning_rate=1e-5)  # Unexpected keyword argument "learning_rate"
    critic: verl.Critic = verl.Critic.from_pretrained("x", tokenizer="y", epochs=2)
    verl.Critic.from_pretrained("x", epoch=2)  # Unexpected keyword argument "epoch"
    engine: verl.VLLMActor = verl.VLLMActor.from_pretrained("x", tensor_parallel_size=2)
    verl.VLLMActor("x", tensor_parallel=2)  # Unexpected keyword argument "tensor_parallel"
    verl.FSDPWorker(model_name="x", fsdp_config={"sharding_strategy": "FULL_SHARD"}, optim_config={"lr": 1e-5})
    verl.FSDPWorker("x", fsdp={})  # Unexpected keyword argument "fsdp"
    verl.FSDPWorker.from_pretrained("x", optim_config={"lr": 1e-5}, use_amp=True)
    verl.MegatronWorker("x", megatron_config={"tensor_model_parallel_size": 2}, train={"epochs": 2}, seed=1)
    verl.MegatronWorker("x", megatron=1)  # Unexpected keyword argument "megatron"
    verl.ActorRolloutRefWorker(model_path="x", max_batch_size=4, rollout_backend="hf", top_p=0.9)
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
