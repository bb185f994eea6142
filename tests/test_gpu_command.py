"""`make gpu`: fails where there is no accelerator, and every command of it runs on a CPU with a tiny model."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest

from verl._host import device

ROOT = Path(__file__).resolve().parent.parent


def gpu(*arguments: str, python: str = sys.executable, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """From elsewhere, the package not installed as far as this command is concerned."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(root / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment, cwd=root.anchor)


@pytest.mark.skipif(device.accelerator() is not None, reason="there is an accelerator")
def test_without_an_accelerator_it_says_so_and_fails(tmp_path: Path) -> None:
    done = gpu("--page", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert "torch finds no accelerator on this machine" in done.stderr
    assert not (tmp_path / "page.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_runs_on_a_cpu(tmp_path: Path) -> None:
    page, made = tmp_path / "page.md", tmp_path / "made"
    done = gpu("--device", "cpu", "--models", "tiny", "--no-peers", "--page", str(page), "--made", str(made))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    text = page.read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert [line.split(":")[0] for line in headings] == [
        "## Tests",
        "## Exactness",
        "## Model, tiny",
        "## Rollout, tiny",
        "## GRPO step, tiny",
    ]
    assert all(": passed in " in line for line in headings)
    assert "greedy: 3 of 3 equal" in text and '"engine": "embedded"' in text and "micro-batch 32" in text
    assert '"share_of_ceiling"' in text and "of the ceiling: step" in text


@pytest.mark.slow
def test_a_command_that_fails_is_on_the_page_and_fails_the_whole(tmp_path: Path) -> None:
    nowhere, page = tmp_path / "no model here", tmp_path / "page.md"
    done = gpu("--device", "cpu", "--models", str(nowhere), "--no-peers", "--page", str(page), "--only", "Rollout")
    assert done.returncode == 1 and "1 of 1 parts failed" in done.stderr
    assert ": FAILED (" in page.read_text(encoding="utf-8")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.mark.parametrize(
    ("code", "verdict", "printed"),
    [
        ("print(1)", "passed in", ["1\n"]),
        ("print(1, flush=True); import time; time.sleep(60)", "FAILED (ended at its limit of 5 s) in", ["1\n"]),
        ("import no_such_package.part", "NOT RUN, package no_such_package is missing, in", []),
        ("import sys; sys.exit('x failed:\\nModuleNotFoundError: No module named a')", "NOT RUN, package a is", []),
        ("import benchmarks.no_such_module", "FAILED (1) in", []),
        ("print('No module named a'); assert False", "FAILED (1) in", ["No module named a\n"]),
        ("import os; os.abort()", "FAILED (-6) in", []),
    ],
)
def test_how_a_part_ends(command: ModuleType, code: str, verdict: str, printed: list[str]) -> None:
    part = command.Part("One", ["-c", code])
    command.run(part, 5 if "sleep" in code else 60)
    assert part.verdict.startswith(verdict) and part.lines == printed


def test_what_a_part_started_ends_with_it(command: ModuleType, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command.run(command.Part("One", ["-c", code]), 5)
    state = Path(f"/proc/{note.read_text()}/stat")

    def has_ended() -> bool:
        try:
            return state.read_text().split()[2] == "Z"
        except OSError:
            return True

    end = time.monotonic() + 10  # a killed process may take a moment to go
    while not has_ended() and time.monotonic() < end:
        time.sleep(0.05)
    assert has_ended()


def test_the_page_is_there_before_the_last_part(command: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    plan = [command.Part("One", ["a.py"], "passed in 1 s", ["2\n"]), command.Part("Two", [])]
    command.write(page, "- Device: none", plan)
    assert page.read_text() == (
        "# What ran on an accelerator\n\n- Device: none\n\n## One: passed in 1 s\n\n```\n$ python a.py\n2\n```\n\n"
        "Still to run: Two.\n"
    )


def wheel(folder: Path, name: str, tag: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)


def test_wheels_come_first_and_those_of_other_pythons_not_at_all(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "unpacked"
    for place in (wheels / "loose_one", folder):
        place.mkdir(parents=True)
    (wheels / "loose_one" / "__init__.py").write_text("name = 'loose'")
    wheel(wheels, "pure", "py3-none-any", {"pure.py": "", "pure-1.0.data/purelib/beside.py": ""})
    wheel(wheels, "other", "cp27-cp27m-win32", {"other.py": ""})
    paths = command.unpacked(wheels, folder)
    assert "other-1.0-cp27-cp27m-win32.whl is left out: it is not for Python" in capsys.readouterr().out
    code = "import loose_one, pure, beside\ntry: import other\nexcept ImportError: print('without')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout == "without\n"
    with pytest.raises(SystemExit, match="there is no such folder"):
        command.unpacked(tmp_path / "nowhere", folder)


#: Not there, and what of the extras imports it as soon as transformers is imported.
LACKING = ("pydantic", "omegaconf", "ray", "typer", "verl", "deepspeed", "xgrammar")
CARRIED = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "omegaconf", "antlr4-python3-runtime")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copied tree, and an interpreter that has this environment's packages without `LACKING`."""
    place = tmp_path_factory.mktemp("bare")
    tree = place / "tree"
    for part in ("verl", "benchmarks", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True, timeout=100)
    python = str(place / "env" / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.suffix != ".pth" and not entry.name.lower().startswith((*LACKING, "__editable__")):
            (site / entry.name).symlink_to(entry)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in LACKING:
        assert subprocess.run([python, "-c", f"import {name}"], capture_output=True, cwd=place, env=env).returncode == 1
    return tree, python


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of what the tree needs, made of what is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in CARRIED:
        found = distribution(name)
        text = found.read_text("WHEEL") or ""
        tag = next(line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: "))
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{found.version}-{tag}.whl", "w") as packed:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    packed.write(str(file.locate()), str(file))
    return folder


TINY = ("--device", "cpu", "--models", "tiny", "--no-peers")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("carried", [False, True], ids=["bare", "with wheels"])
def test_a_copied_tree_runs_on_a_bare_machine(
    bare: tuple[Path, str], wheels: Path, tmp_path: Path, carried: bool
) -> None:
    tree, python = bare
    page = tmp_path / "page.md"
    rest = ("--page", str(page), "--made", str(tmp_path / "made"), *(("--wheels", str(wheels)) if carried else ()))
    done = gpu(*TINY, *rest, python=python, root=tree)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    text = page.read_text(encoding="utf-8")
    verdicts = [line.split(": ")[1].split(" in ")[0] for line in text.splitlines() if line.startswith("## ")]
    assert len(verdicts) == 5 and verdicts[2] == "passed"
    assert {*verdicts} - {"passed"} == (set() if carried else {"NOT RUN, package pydantic is missing,"})
