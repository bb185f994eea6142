"""What a run used and was changed since is refused by name on resume, or changes nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.runs import final_state
from verl._host import user_functions as loading
from verl.config import build_config
from verl.errors import ConfigError, VerlError
from verl.run.train import train

REWARD = """
import os, sys
sys.path.insert(0, os.path.join(os.getcwd(), "elsewhere"))
sys.path.insert(0, os.getcwd())
from changes_beside import BESIDE
from changes_package.inner import BELOW
from changes_other import OTHER

def score(responses, prompts, answer):
    from changes_late import LATE
    words = open("words.txt").read().split()
    return [len(r) % 7 * BESIDE + BELOW + OTHER + LATE + len(words) for r in responses]
"""
EPISODE = """
from verl.rollout.turns import Turns

async def once(client, row):
    return [Turns().wrote(await client.generate(row["prompt_tokens"]))]
"""
ALGORITHM = """
from dataclasses import dataclass
from verl.algorithms.baselines import GRPO

@dataclass
class Mine(GRPO):
    name = "mine"
"""


def make_world(root: Path, tiny: Path, **changes: Any) -> None:
    """A folder with all that a run reads, and the run's first step."""
    files = {
        "reward.py": REWARD, "episode.py": EPISODE, "algorithm.py": ALGORITHM, "words.txt": "one two",
        "changes_beside.py": "BESIDE = 1.0", "changes_package/__init__.py": "", "changes_late.py": "LATE = 0.0",
        "changes_package/inner.py": "BELOW = 0.0", "elsewhere/changes_other.py": "OTHER = 0.0",
        "train.jsonl": "".join(json.dumps({"prompt": f"Number {i}", "answer": str(i)}) + "\n" for i in range(6)),
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copytree(tiny, root / "model")
    with inside(root):
        train(config(1, **changes))


class inside:  # noqa: N801
    """In a folder, with none of the user's files imported, as a process of its own begins."""

    def __init__(self, root: Path) -> None:
        self.root, self.patch = root, pytest.MonkeyPatch()

    def __enter__(self) -> None:
        self.patch.chdir(self.root)
        self.patch.setattr(sys, "path", [*sys.path])
        for name in ("user_modules", "_imported", "_returned"):
            self.patch.setattr(loading, name, {})
        loading.elsewhere.clear()
        for name in [name for name in sys.modules if name.startswith(("changes_", "verl_user_"))]:
            del sys.modules[name]

    def __exit__(self, *error: object) -> None:
        self.patch.undo()


def config(steps: int, **changes: Any) -> Any:
    flat = {
        "actor_rollout_ref.model.path": "model", "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.max_new_tokens": 4, "actor_rollout_ref.rollout.episode": "episode.py:once",
        "algorithm.name": "algorithm.py:Mine", "algorithm.kl_in": "loss", "algorithm.kl_coef": 0.1,
        "data.train": "train.jsonl", "data.batch_size": 2, "reward.path": "reward.py:score",
        "reward.files": ["words.txt"], "trainer.total_steps": steps, "trainer.save_every": 1,
        "trainer.loggers": [], "trainer.run_name": "test", **changes,
    }  # fmt: skip
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = nested
        for name in parents:
            node = node.setdefault(name, {})
        if value is not None:
            node[last] = value
    return build_config(nested)


@pytest.fixture(scope="module")
def world(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    make_world(root, tiny)
    return root


@pytest.fixture
def copied(world: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(world, tmp_path / "world", symlinks=True)
    with inside(tmp_path / "world"):
        yield tmp_path / "world"


def appended(name: str, text: str = "\n# another\n") -> Callable[[], object]:
    return lambda: Path(name).write_text(Path(name).read_text() + text)


def in_json(name: str, **values: Any) -> Callable[[], object]:
    def change() -> None:
        content = json.loads(Path(name).read_text()) if Path(name).exists() else {}
        Path(name).write_text(json.dumps(content | values))

    return change


def first_row(**values: Any) -> Callable[[], object]:
    def change() -> None:
        first, *others = Path("train.jsonl").read_text().splitlines()
        Path("train.jsonl").write_text("\n".join([json.dumps(json.loads(first) | values), *others]) + "\n")

    return change


def other_weights() -> None:
    weights = load_file("model/model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] * 1.01}, "model/model.safetensors", metadata={"format": "pt"})


def another_id() -> None:
    content = json.loads(Path("model/tokenizer.json").read_text())
    content["added_tokens"] = [{**token, "lstrip": not token["lstrip"]} for token in content["added_tokens"]]
    Path("model/tokenizer.json").write_text(json.dumps(content))


def edited_code() -> None:
    file = Path("runs/latest/code.json")
    content = json.loads(file.read_text())
    content["files"]["reward.py"] = "0" * 64
    file.write_text(json.dumps(content))


#: What changes -> how, and what the refusal names.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "the reward's file": (appended("reward.py"), r"reward\.py has changed"),
    "its helper in the same folder": (appended("changes_beside.py"), r"changes_beside\.py has changed"),
    "in a package below": (appended("changes_package/inner.py"), r"changes_package/inner\.py has changed"),
    "in another folder on the path": (appended("elsewhere/changes_other.py"), r"elsewhere/changes_other\.py has"),
    "imported late, in the reward's process": (appended("changes_late.py"), r"changes_late\.py has changed"),
    "a file that it reads": (appended("words.txt", " three"), r"words\.txt has changed"),
    "an episode": (appended("episode.py"), r"episode\.py has changed"),
    "an algorithm": (appended("algorithm.py"), r"algorithm\.py has changed"),
    "the model's eps": (in_json("model/config.json", rms_norm_eps=1e-3), r"model/config\.json has changed"),
    "the model's rope": (in_json("model/config.json", rope_theta=500.0), r"model/config\.json has changed"),
    "ends of generation": (in_json("model/generation_config.json", eos_token_id=[5]), r"model/generation_config\.json"),
    "the chat template": (
        in_json("model/tokenizer_config.json", chat_template="{{ messages }}!"), r"model/tokenizer_config\.json",
    ),
    "a chat template that is added": (
        lambda: Path("model/another.jinja").write_text("{{ messages[0]['content'] }}!"), r"model/another\.jinja",
    ),
    "tokenizer": (another_id, r"model/tokenizer\.json has changed"),
    "weights of the reference": (other_weights, r"reference\.sha256"),
    "a data row": (first_row(prompt="Another"), "the data|data"),
    "an answer": (first_row(answer="7"), "data"),
    "one row more": (appended("train.jsonl", '{"prompt": "More", "answer": "1"}\n'), "data"),
    "code.json": (edited_code, r"reward\.py has changed"),
    "no code.json": (lambda: Path("runs/latest/code.json").unlink(), r"code\.json is not there any more"),
    "no file that it reads": (lambda: Path("words.txt").unlink(), r"reward\.files: there is no file 'words\.txt'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_change_between_two_attempts_is_refused_by_name(copied: Path, what: str) -> None:
    change, named = REFUSED[what]
    change()
    before = (copied / "runs/latest/metrics.jsonl").read_bytes()
    with pytest.raises(VerlError, match=named):
        train(config(2))
    assert (copied / "runs/latest/metrics.jsonl").read_bytes() == before


def test_an_accepted_change_of_a_models_file_is_recorded(copied: Path) -> None:
    Path("model/chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    train(config(2), accept_edits=True)
    content = json.loads(Path("runs/latest/code.json").read_text())
    assert [edit["file"] for edit in content["edits"]] == ["model/chat_template.jinja"]
    train(config(3))


#: What a run does not read again: weights are in the checkpoint, and settings come from the command.
HARMLESS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "config.yaml": appended("runs/latest/config.yaml", "\nnonsense: true\n"),
    "metrics.jsonl": lambda: Path("runs/latest/metrics.jsonl").write_text('{"step": 1, "reward": 99.0}\n'),
    "weights that nothing compares": other_weights,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HARMLESS)
def test_a_change_of_what_is_not_read_again_changes_nothing(tiny: Path, tmp_path: Path, what: str) -> None:
    changes = {"algorithm.name": "grpo", "algorithm.kl_in": None, "algorithm.kl_coef": None}
    for name in ("whole", "cut"):
        make_world(tmp_path / name, tiny, **changes)
    states = []
    for name in ("whole", "cut"):
        with inside(tmp_path / name):
            if name == "cut":
                HARMLESS[what]()
            train(config(2, **changes))
            states.append(final_state(Path("runs/latest").resolve()))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


AGENT = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["answer"]}]})
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
urllib.request.urlopen(request).read()
print(json.dumps({"reward": 1.0}))
"""


@pytest.mark.parametrize("changed", ["script.py", "agent.py"])
def test_the_script_of_an_agents_command_is_its_code(tiny: Path, tmp_path: Path, changed: str) -> None:
    """The command's own words are enough: nothing of it is run."""
    tmp_path.joinpath("script.py").write_text(AGENT)
    tmp_path.joinpath("agent.py").write_text(
        f"from verl.rollout.gateway.gateway import Gateway\n"
        f"agent = Gateway([{sys.executable!r}, 'script.py', '--rows=train.jsonl'], chat_template='hermes')\n"
    )
    changes = {
        "actor_rollout_ref.rollout.episode": "agent.py:agent", "reward.path": None, "reward.files": None,
        "algorithm.name": "grpo", "trainer.eval_every": None,
    }  # fmt: skip
    make_world(tmp_path, tiny, **changes)
    with inside(tmp_path):
        kept = json.loads(Path("runs/latest/code.json").read_text())["files"]
        assert {"script.py", "agent.py", "train.jsonl", "model/config.json"} <= kept.keys()
        appended(changed)()
        with pytest.raises(ConfigError, match=changed.replace(".", r"\.") + " has changed"):
            train(config(2, **changes))
