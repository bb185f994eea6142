"""Every block of Python and YAML in README and docs: run as it stands, or its names and settings are there."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import verl
from tests.test_docs import PAGES, ROOT
from verl.algorithms import registry
from verl.config import load_config
from verl.dataflow import nodes
from verl.errors import ConfigError
from verl.rewards import registry as rewards

#: Blocks that are run by tests that need more: a page's blocks by their number, and where.
ELSEWHERE = {
    "README.md 0": "tests/test_docs.py",
    "docs/index.md 0": "tests/test_docs.py",
    "docs/agents.md 0": "tests/test_docs.py",
    "docs/agents.md 1": "tests/test_docs.py",
    **{f"docs/agent_semantics.md {number}": "tests/test_docs.py" for number in range(5)},
    "docs/gsm8k.md 0": "tests/test_docs.py",
    "docs/algorithms.md 1": "tests/algorithms/test_docs.py",
    "docs/episodes.md 2": "tests/rollout/test_environments.py",
    "docs/episodes.md 4": "tests/test_doc_commands.py",
    "docs/from_trl.md 1": "tests/trl/test_trl.py",
    "docs/from_trl.md 2": "tests/trl/test_trl.py",
}
#: Blocks that nothing runs as they stand, and why. Their names and keywords are looked up.
NOT_RUN = {
    "docs/asynchronous.md 0": "starts worker processes without end",
    "docs/distributed.md 0": "needs six GPUs",
    "docs/engines.md 0": "needs servers of vLLM",
    "docs/engines.md 1": "needs vLLM",
    "docs/episodes.md 5": "trains the agent of the block before: docs/agents.md is run",
    "docs/hybrid_engine.md 0": "needs several ranks",
    "docs/hybrid_engine.md 1": "needs several ranks",
    "docs/tasks.md 0": "needs the reward model that its settings name",
    "docs/tasks.md 1": "goes with three tasks over a long run",
}
#: What a page leaves to its reader.
READER = """
import verl
actor = verl.Actor(MODEL, sampling={"max_new_tokens": 4})
def score(texts):
    return [float(len(text)) for text in texts]
f = score
"""
TRAINER = READER + 'trainer = verl.Trainer(actor, reward_fn=f, algorithm="grpo", n=2, log_dir=False)\n'
BEFORE = {
    "docs/data.md 0": TRAINER
    + """
import json
from pathlib import Path
from torch.utils.data import DataLoader
dataset = [{"prompt": "Once upon"}] * 128
code = dataset
Path("math.jsonl").write_text(json.dumps(dataset[0]) + "\\n")
f = lambda rows: rows
""",
    "docs/data.md 1": TRAINER
    + """
import json
from pathlib import Path
Path("prompts.jsonl").write_text((json.dumps({"prompt": "Once upon"}) + "\\n") * 8)
pair = {"prompt": "Once upon", "chosen": " a time", "rejected": " no"}
Path("pairs.jsonl").write_text((json.dumps(pair) + "\\n") * 8)
""",
    "docs/dataflow.md 1": READER
    + """
class SafetyRewardNode(verl.RewardNode):
    column = "cost"
    def score(self, responses, prompts):
        return [float("bomb" in text) for text in responses]
verl.register_node("safety_reward")(SafetyRewardNode)
""",
    "docs/dataflow.md 2": READER + 'prompt_batch = ["Once upon a time"] * 4\n',
    "docs/episodes.md 6": """
import os, verl
os.environ["SEARCH_API_KEY"] = "sk-1"
def agent(base_url, api_key, row):
    return 1.0
""",
    "docs/episodes.md 7": """
import verl
from pathlib import Path
Path("tables").mkdir()
""",
    "docs/lora.md 0": """
import peft, transformers, verl
model = transformers.AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
peft_model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
""",
    "docs/metrics.md 0": TRAINER,
}
#: Changes that make a block short.
SHORTER = (
    ("1000", "2"), ("steps=100", "steps=2"), ("range(10)", "range(2)"), ("batch_size=64", "batch_size=4"),
    ("dataset, 64", "dataset, 4"), ("workers=4", "workers=1"), ("scale(16)", "scale(2)"),
    ("models/SmolLM2-135M-Instruct", "MODEL"),
)  # fmt: skip


def blocks(language: str, pages: Sequence[Path] = PAGES) -> dict[str, str]:
    """The blocks by page and number."""
    texts = {}
    for page in pages:
        each = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        texts |= {f"{page.relative_to(ROOT).as_posix()} {number}": text for number, text in enumerate(each)}
    return texts


PYTHON, YAML = blocks("python"), blocks("yaml")
STARTS_RAY = ("docs/rewards.md 2",)
RUN = [
    pytest.param(name, marks=pytest.mark.slow if name in STARTS_RAY else ())
    for name in PYTHON
    if name not in ELSEWHERE and name not in NOT_RUN
]


def test_the_lists_name_blocks_that_there_are() -> None:
    assert {*ELSEWHERE, *NOT_RUN, *BEFORE} <= {*PYTHON}
    assert all(
        name.split()[0].rpartition("/")[2] in (ROOT / test).read_text("utf-8") for name, test in ELSEWHERE.items()
    )


def of_the_package(kind: Any) -> bool:
    return (kind if isinstance(kind, str) else kind.__module__).startswith("verl.")


@pytest.mark.quick("docs/dataflow.md 1", "docs/how_do_i.md 0", "docs/rewards.md 1")
@pytest.mark.parametrize("name", RUN)
def test_a_block_runs_as_it_stands(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for known, names in ((registry, "_ALGORITHMS"), (nodes, "_REGISTERED"), (rewards, "REWARDS")):
        kinds = {name: kind for name, kind in getattr(known, names).items() if of_the_package(kind)}
        monkeypatch.setattr(known, names, kinds)  # without what other tests and blocks register
    scope: dict[str, Any] = {"__name__": "block", "MODEL": str(tiny)}
    exec(BEFORE.get(name, READER), scope)
    text = PYTHON[name]
    for long, short in SHORTER:
        text = text.replace(long, short)
    exec(compile(text.replace('"MODEL"', "MODEL"), name, "exec"), scope)


def names_of(tree: ast.AST) -> list[tuple[str, list[str]]]:
    """Names of the package in a block, such as `verl.Trainer`, with the keywords that it is called with."""
    calls = {
        id(node.func): [key.arg for key in node.keywords if key.arg]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    return [
        (ast.unparse(node), calls.get(id(node), []))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"verl(\.\w+)+", ast.unparse(node))
    ]


@pytest.mark.parametrize("name", PYTHON)
def test_the_names_of_a_block_are_there(name: str) -> None:
    tree = compile(PYTHON[name], name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for path, keywords in names_of(tree):
        value: Any = verl
        for part in path.split(".")[1:]:
            value = getattr(value, part)
        if keywords:
            parameters = inspect.signature(value).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                assert {*keywords} <= {*parameters}, path


@pytest.mark.parametrize("name", YAML)
def test_settings_of_a_block_are_taken(name: str, tmp_path: Path) -> None:
    """Over a recipe that has what every run needs."""
    settings = yaml.safe_load(textwrap.dedent(YAML[name]))
    if isinstance(settings, list):
        settings = {"tasks": settings}
    if "reward_model" in settings or "constraint_model" in settings:  # of a task
        settings = {"tasks": [{"name": "sums", "type": "grpo", "reward_model": "math", **settings}]}
    settings.setdefault("data", {}).setdefault("train", "train.jsonl")
    settings.setdefault("actor_rollout_ref", {}).setdefault("model", {}).setdefault("path", "models/tiny")
    if "tasks" not in settings:
        settings.setdefault("reward", {"name": "math"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    load_config(tmp_path / "recipe.yaml", [])
    with pytest.raises(ConfigError):
        load_config(tmp_path / "recipe.yaml", ["data.no_such_key=1"])
