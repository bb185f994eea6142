"""Every shell block of README and docs: one that can run in a clean checkout runs as it is pasted, the others are
listed with the reason. Each command that a page names is there, with its options and settings."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.agent_packages import folder as agent_packages
from tests.test_doc_blocks import blocks
from tests.test_docs import PAGES, ROOT
from verl.algorithms import algorithm_names, make_algorithm
from verl.cli.main import app
from verl.config import describe
from verl.config.other_names import NAMES

HISTORY = "docs/log.md"
PAGES_NOW = [page for page in (*PAGES, ROOT / "examples/agent/README.md") if page != ROOT / HISTORY]
BLOCKS, PYTHON = blocks("sh", PAGES_NOW), blocks("python")
INSTALL = "installs packages: scripts/environments.py does it, in clean environments"
MINUTES = "trains for minutes or hours; its settings are tried by --dry-run"
#: Blocks that nothing runs as they stand, and why.
NOT_RUN = {
    "README.md 0": INSTALL,
    "README.md 1": MINUTES,
    "docs/agents.md 0": INSTALL,
    "docs/distributed.md 0": "several processes, a cluster, two nodes",
    "docs/engines.md 0": "needs vLLM",
    "docs/engines.md 1": "needs vLLM",
    "docs/from_verl.md 0": "a sketch: it ends with ...",
    "docs/gpu.md 0": "needs a GPU",
    "docs/gpu.md 1": "needs a GPU; tests/test_gpu_command.py runs the second command",
    "docs/gpu.md 2": "needs a GPU, and a folder of wheels",
    "docs/gsm8k.md 0": INSTALL,
    "docs/gsm8k.md 1": "downloads GSM8K; tests/test_docs.py runs its last line on a made sample",
    "docs/gsm8k.md 2": "downloads a model; tests/test_docs.py runs it on a tiny one",
    "docs/gsm8k.md 3": MINUTES,
    "docs/gsm8k.md 4": "needs the run before; tests/cli/test_eval.py compares two models",
    "docs/hybrid_engine.md 0": "eight processes; two of its lines need root",
    "docs/index.md 0": INSTALL,
    "docs/tasks.md 0": MINUTES,
    "docs/tune.md 0": "installs Optuna, and trains 20 times",
    "examples/agent/README.md 0": INSTALL,
    "examples/agent/README.md 1": "needs SmolLM2-135M-Instruct; tests/test_example_agent.py runs the agent",
}
#: Of how_do_i.md: what begins so in a block of it, too.
NOT_RUN |= {
    name: MINUTES
    for name, text in BLOCKS.items()
    if name.startswith("docs/how_do_i.md") and re.search(r"^(verl (train|eval)|torchrun)", text, re.MULTILINE)
}
LINKS = f"ln -s {shlex.quote(str(ROOT))}/{{benchmarks,examples}} .\n"
RECIPE = "verl init new --model TINY && mv new/* .\n"
#: A finished run: its rewards differ, which those of sums by a model of random weights do not.
RUN = (
    RECIPE
    + """
echo 'def letters(texts): return [float(len(set(text))) for text in texts]' >> rewards.py
verl train recipe.yaml trainer.total_steps=1 data.batch_size=2 data.eval=null reward.path=rewards.py:letters
cp -r "$(readlink -f runs/latest)" runs/shop
"""
)
SHAPE = "python benchmarks/made_model.py qwen2.5-7b Qwen/Qwen2.5-7B-Instruct --config-only\n"
MODEL = "mkdir -p models && ln -s TINY models/SmolLM2-135M-Instruct\n"
QUESTIONS = "".join(json.dumps({"input": f"{i} + {i}?", "label": str(2 * i)}) + "\n" for i in range(8))
#: Blocks that run as they are pasted, and what a reader has done before. `TINY` is a model.
RUNS = {
    "docs/agents.md 1": MODEL,
    "docs/agents.md 2": RUN,
    "docs/episodes.md 0": MODEL,
    "docs/from_openrlhf.md 0": "ln -s TINY MODEL\n",
    "docs/gpu.md 3": SHAPE,
    "docs/how_do_i.md 15": RUN,
    "docs/models.md 0": RECIPE,
    "docs/planner.md 0": SHAPE + RECIPE.replace("TINY", "Qwen/Qwen2.5-7B-Instruct"),
}
#: Files of a block, as its page has them: the blocks of Python.
FILES = {
    "docs/agents.md 1": {"shop.py": "docs/agents.md 0"},
    "docs/episodes.md 0": {"agent.py": "docs/episodes.md 4"},
    "docs/from_openrlhf.md 0": {"reward_func.py": "docs/from_openrlhf.md 0"},
}
#: Scripts that a page has its reader write.
READER = {"script.py", "prepare.py"}
#: Modules and programs of others.
OTHERS = {"venv", "pytest", "vllm.entrypoints.openai.api_server", "verl.trainer.main_ppo"}
PROGRAMS = {"cd", ".", "git", "hf"}
PACKAGES = {"torch", "openai", "huggingface_hub"}


def commands(text: str) -> Iterator[list[str]]:
    """The commands in a piece of shell, as words, without redirections and the variables before them."""
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        command: list[str] = []
        words = iter(lexer)
        for word in words:
            if word in (">", ">>", "<"):
                next(words)
            elif set(word) <= set(";&|"):
                yield from filter(None, [command])
                command = []
            elif command or not (word == "sudo" or re.match(r"\w+=", word)):
                command.append(word)
        yield from filter(None, [command])


def inline(page: Path) -> Iterator[str]:
    """Commands of several words in the text of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.match(r"([\w./-]*python3?|make|torchrun) ", span):
            yield span


@cache
def settings() -> frozenset[str]:
    options = {field.name for name in algorithm_names() for field in fields(type(make_algorithm(name)))}
    return frozenset({key.path for key in describe()} | set(NAMES) | {f"algorithm.{option}" for option in options})


@cache
def commands_of_verl() -> Any:
    return typer.main.get_command(app)


def command_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command of `verl` that words name, and the rest of them."""
    command, rest = commands_of_verl(), [*words]
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"verl has no command {' '.join(rest[:1])}"
        command = command.commands[rest.pop(0)]
    return command, rest


def check_verl(words: Sequence[str]) -> None:
    command, rest = command_of(words)
    try:
        command.make_context("verl", [*rest])
    except Exception as error:
        if not hasattr(error, "exit_code"):  # click's errors have one: a wrong option, a missing argument
            raise
        raise AssertionError(f"{' '.join(words)}: {error}") from error
    for word in rest:
        if key := re.match(r"([a-z_]+(?:\.\w+)+)=", word):
            assert key[1] in settings(), f"there is no setting {key[1]}"


@cache
def options_of(script: Path) -> frozenset[str]:
    """The options that a script takes, with those of modules beside it."""
    tree = ast.parse(script.read_text("utf-8"))
    texts = {
        word.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.Compare)
        for part in (node.args if isinstance(node, ast.Call) else node.comparators)
        for word in (part.elts if isinstance(part, ast.List) and isinstance(node, ast.Compare) else [part])
        if isinstance(word, ast.Constant) and str(word.value).startswith("-")
    }
    names = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    beside = [script.with_name(f"{name}.py") for name in names - {script.stem}]
    return frozenset(texts).union(*(options_of(module) for module in beside if module.is_file()))


def check_options(script: Path, words: Sequence[str]) -> None:
    wrong = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options_of(script)]
    assert not wrong, f"{script.name} has no {', '.join(wrong)}"


def check_python(words: Sequence[str]) -> None:
    name, *rest = words
    if name != "-m":
        if name not in READER:
            assert (ROOT / name).is_file(), f"there is no {name}"
            check_options(ROOT / name, rest)
    elif rest[0] == "verl":
        check_verl(rest[1:])
    elif rest[0] not in OTHERS:
        spec = importlib.util.find_spec(rest[0])
        assert spec is not None and spec.origin is not None, f"there is no module {rest[0]}"
        assert "__main__" in spec.origin + Path(spec.origin).read_text("utf-8"), f"{rest[0]} runs nothing"


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = [word for word in words if "=" not in word]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"the Makefile reads no {name}"
        script = re.search(rf"^{targets[0]}:[^\n]*\n[^\n]*python (\S+\.py) [^\n]*\$\(ARGS\)", makefile, re.MULTILINE)
        if name == "ARGS" and script is not None:
            check_options(ROOT / script[1], shlex.split(value))


def check_torchrun(words: Sequence[str]) -> None:
    spec = importlib.util.find_spec("torch.distributed.run")  # to import it takes seconds
    assert spec is not None and spec.origin is not None
    count = next(number for number, word in enumerate(words) if not word.startswith("--"))
    for word in words[:count]:
        assert f'"{word.partition("=")[0]}"' in Path(spec.origin).read_text("utf-8"), f"torchrun has no {word}"
    check_python(words[count:])


def check_pip(words: Sequence[str]) -> None:
    extras = (ROOT / "pyproject.toml").read_text("utf-8")
    assert words[0] == "install"
    for word in words[1:]:
        name, _, chosen = word.strip("]").partition("[")
        assert name == "." or name in PACKAGES, f"pip install {word}"
        assert all(re.search(rf"^{extra} = \[", extras, re.MULTILINE) for extra in filter(None, chosen.split(",")))


def check(words: Sequence[str]) -> None:
    """Raises what is wrong with a command: its program, file, subcommand, options or settings."""
    name = words[0].rpartition("/")[2]
    known = {
        "verl": check_verl,
        "python": check_python,
        "python3": check_python,
        "make": check_make,
        "torchrun": check_torchrun,
        "pip": check_pip,
    }
    if name in known:
        known[name](words[1:])
    else:
        assert name in PROGRAMS, f"unknown: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_are_there(page: Path) -> None:
    """Also of commands in the text, which may leave arguments out."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text("utf-8"))
    for name, rest in re.findall(r"(?:^|`|-m )verl (\w+)([^`\n#]*)", text, re.MULTILINE):
        command, _ = command_of([name, *([rest.split()[0]] if name == "agent" else [])])
        options = {"--help"}.union(*((*each.opts, *each.secondary_opts) for each in command.params))
        wrong = [option for option in re.findall(r"(?<!\S)--[\w-]+", rest) if option not in options]
        assert not wrong, f"{page.name}: verl {name} has no {', '.join(wrong)}"


def test_each_shell_block_runs_or_says_why_not() -> None:
    assert {*NOT_RUN, *RUNS} == {*BLOCKS}
    assert not {*NOT_RUN} & {*RUNS}


@pytest.mark.parametrize("page", PAGES_NOW, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_stand_in_shell_blocks(page: Path) -> None:
    """A block without a language, or with another name of shell, would be looked at by nothing."""
    for language, text in re.findall(r"^```(\S*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        assert language in ("", "sh", "python", "yaml", "text", "bibtex"), language
        if language in ("", "text"):
            assert not re.search(r"^(\$ )?(verl|pip|make|torchrun|python3?) ", text, re.MULTILINE), text


@pytest.mark.parametrize("name", BLOCKS)
def test_the_commands_of_a_block_are_there(name: str) -> None:
    for words in commands(BLOCKS[name]):
        check(words)


@pytest.mark.parametrize("page", PAGES_NOW, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_in_a_text_are_there(page: Path) -> None:
    for span in inline(page):
        for words in commands(span):
            check(words)


@pytest.mark.parametrize(
    "command",
    [
        "verl trian recipe.yaml",
        "verl train recipe.yaml --dry",
        "verl train recipe.yaml actor_rollout_ref.actor.optim.rl=1",
        "verl agent",
        "verl export",
        "python -m verl.cli.main train recipe.yaml",
        "torchrun --nproc_per_node=2 -m verl.cli.main train recipe.yaml",
        "python scripts/picture.py",
        "sudo python benchmarks/rollout.py --engine vllm",
        "make gpus",
        "make gpu ARGS='--part Rollout'",
        "pip install '.[vlm]'",
        "A=1 rm -r runs",
        "cd sums && verl tarin recipe.yaml > out.txt",
    ],
)  # fmt: skip
def test_a_wrong_command_is_noticed(command: str) -> None:
    *good, wrong = commands(command)
    for words in good:
        check(words)
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.fixture
def shell(tiny: Path, tmp_path: Path) -> Any:
    """Runs shell in an empty folder, beside whose files are the checkout's `examples` and `benchmarks`; `verl` and
    `python` are this environment's. Returns what is printed."""
    programs, folder = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    for name, command in (("python", ""), ("verl", "-m verl")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        (programs / name).chmod(0o755)
    shutil.copytree(tiny, tmp_path / "tiny")

    def run(text: str, **files: str) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
        text = text.replace("TINY", str(tmp_path / "tiny"))
        packages = agent_packages()
        paths = [str(ROOT), *([str(packages)] if packages else [])]
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
        }
        done = subprocess.run(
            ["bash", "-euc", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_block_runs_as_it_is_pasted(name: str, shell: Any) -> None:
    files = {file: PYTHON[block] for file, block in FILES.get(name, {}).items()}
    if (
        "import openai" in "".join(files.values())
        and importlib.util.find_spec("openai") is None
        and agent_packages() is None
    ):
        pytest.skip("`benchmarks/peer_env.sh agents` makes the environment")
    said = shell(LINKS + RUNS[name] + BLOCKS[name], **files, **{"data.jsonl": QUESTIONS})
    if name == "docs/gpu.md 3":  # and the page shows what it prints
        (shown,) = re.findall(
            r"^```text\n(.*?)^```", (ROOT / "docs/gpu.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        assert shown in said


@pytest.mark.slow
def test_the_quick_commands_of_longer_blocks_run(shell: Any) -> None:
    quick = {
        line for name in NOT_RUN for line in BLOCKS[name].splitlines() if re.match(r"verl (init|doctor|config)\b", line)
    }
    assert {line.split()[1] for line in quick} >= {"init", "doctor"}
    for line in sorted(quick):
        shell(line)


def dry_runs() -> dict[str, list[str]]:
    """Commands that train by `recipe.yaml`, by their text."""
    found = {}
    for name, text in BLOCKS.items():
        for words in commands(text):
            if words[0] == "torchrun" and "verl" in words:
                words = words[words.index("verl") :]
            if name != "docs/planner.md 0" and words[:3] == ["verl", "train", "recipe.yaml"]:
                found[" ".join(words)] = words[1:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", dry_runs())
def test_settings_of_a_command_go_together(
    command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["init", "sums", "--model", str(tiny)]).exit_code == 0
    monkeypatch.chdir(tmp_path / "sums")
    result = runner.invoke(app, [*dict.fromkeys([*dry_runs()[command], "--dry-run"])])
    if extra := re.search(r"is not installed: pip install '(verl-hybrid\[\w+\])'", result.output):
        pytest.skip(f"needs {extra[1]}")
    assert result.exit_code == 0, result.output
