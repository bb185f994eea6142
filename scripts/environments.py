"""Install the package as a stranger would, in one environment after the other, and try it there.

    python scripts/environments.py [NAME ...] [--torch-args='--index-url URL'] [--keep]

The environments: python3.11 to python3.13 with the newest dependencies (what pyenv has, or PATH; one that is not there
is named), lower-bounds (each dependency of pyproject.toml as old as it says), no-compiler and read-only-home (these two
in the environment that runs this script), wheel (an empty environment with the wheel, built from an sdist of tracked
files, and links to the core dependencies of the one that runs this script; no compiler). Each runs the README's quick
start, `verl init` with two steps of `verl train`, and `verl doctor`, on a tiny model of random weights, offline. trl is
the environment of that peer, and runs the tests that compare with it; agents has what agents are written with, and runs
the tests that need it. The exit code is 1 if one failed, 77 if one that was named cannot be made here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
#: The one that has wheels of every lower bound.
_OLDEST = "3.11"
_COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c89|c99)(-[\d.]+)?")
_INSTALL_SECONDS, _TRIAL_SECONDS, _PEER_SECONDS = 900, 600, 1800
#: What an installation says that this machine, not the package, is to blame for.
_UNAVAILABLE = re.compile(
    r"connection broken|Could not fetch URL|\(from versions: none\)|No matching distribution found for torch\b"
    r"|ensurepip is not available|: not done after "
)
_NOT_MADE = 77
_SETTINGS = (
    "reward.path=letters.py:letters", "trainer.total_steps=2", "data.batch_size=2", "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_new_tokens=8", "trainer.output_dir=runs",
)  # fmt: skip


#: The tests that need what the environment of a peer has (benchmarks/peer_env.sh), and which of them.
PEERS = {
    "trl": ("peer", ["tests/trl"]),
    "agents": ("peer or not slow", [
        "tests/rollout/test_gateway_agents.py", "tests/rollout/test_gateway_clients.py", "tests/test_example_agent.py",
        "tests/test_docs.py::test_the_agent_of_the_tutorial_is_trained",
    ]),
}  # fmt: skip
#: That even a model of random weights can learn from.
_REWARD = "def letters(responses):\n    return [float(len(set(response))) for response in responses]\n"


class FailedError(Exception):
    """With the end of what the command printed."""


class UnavailableError(Exception):
    """The environment cannot be made on this machine."""


@dataclass(frozen=True)
class Environment:
    """One way to have the package.

    Attributes:
        version: of a Python to install into anew; None: the Python that runs this script, with what it has.
        requirements: what is installed beside the package.
        before: what a command begins with.
        env: changes of the variables; None removes one.
        is_wheel: the wheel, with the core dependencies alone.
        peer: whose environment (benchmarks/peer_env.sh) is made for the tests that compare with it.
    """

    version: str | None = None
    requirements: Sequence[str] = ()
    before: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    is_wheel: bool = False
    peer: str | None = None


def environments(scratch: Path) -> dict[str, Environment]:
    """All, by name."""
    home = scratch / "home"
    home.mkdir()
    home.chmod(0o555)
    # Root may write where the mode forbids it, unless it gives that right up.
    weaker = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override") if os.geteuid() == 0 else ()
    no_compiler = {"PATH": str(_without_compilers(scratch / "bin")), "CC": None, "CXX": None}
    return {
        **{f"python{version}": Environment(version) for version in VERSIONS},
        "lower-bounds": Environment(_OLDEST, lower_bounds((ROOT / "pyproject.toml").read_text())),
        "no-compiler": Environment(env=no_compiler),
        "wheel": Environment(env={**no_compiler, "PYTHONPATH": None}, is_wheel=True),
        "read-only-home": Environment(before=weaker, env={"HOME": str(home), "XDG_CACHE_HOME": None, "HF_HOME": None}),
        **{peer: Environment(peer=peer) for peer in PEERS},
    }


def _without_compilers(folder: Path) -> Path:
    """A folder with a link to each program on PATH, compilers left out."""
    folder.mkdir()
    for place in map(Path, os.get_exec_path()):
        for program in place.glob("*") if place.is_dir() else ():
            if not _COMPILER.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


def lower_bounds(pyproject: str) -> list[str]:
    """The package's own dependencies, each at its lower bound, with its marker."""
    ((listed,),) = [re.findall(r"^dependencies = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)]
    found = re.findall(r'^ *"([\w-]+)>=([\w.]+)(;[^"]*)?"', listed, re.MULTILINE)
    assert len(found) == len(listed.strip().splitlines()), "a dependency without a lower bound"
    return [f"{name}=={version}{marker}" for name, version, marker in found]


def find_python(version: str) -> str | None:
    """A Python of that version: of pyenv, or on PATH."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    known = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(known[-1]) if known else shutil.which(f"python{version}")


def install(environment: Environment, python: str, folder: Path, torch_args: Sequence[str]) -> str:
    """A new environment in `folder`, torch first; returns its Python.

    Raises:
        UnavailableError: there is no torch for it, or no registry.
        FailedError: the package cannot be installed.
    """
    make([python, "-m", "venv", folder], cwd=folder.parent)
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet"]
    torch = next((item for item in environment.requirements if item.startswith("torch==")), "torch")
    make([*pip, *torch_args, torch], cwd=folder)
    make([*pip, *environment.requirements, str(ROOT)], cwd=folder)
    return inside


def install_wheel(folder: Path) -> str:
    """A new environment in `folder` with the wheel and its core dependencies, links to those of this environment;
    returns its Python.

    Raises:
        FailedError: a distribution cannot be built or installed.
    """
    run([sys.executable, "-m", "venv", "--without-pip", folder], cwd=folder.parent)
    inside = str(folder / "bin" / "python")
    (site,) = folder.glob("lib/python*/site-packages")
    for file in core_files():
        if not (site / file.name).exists():
            (site / file.name).symlink_to(file)
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, build(folder.parent / "dist")], cwd=folder)
    return inside


def core_files() -> set[Path]:
    """What the core dependencies, and theirs, have in the folder of installed packages."""
    from packaging.requirements import Requirement

    pyproject = (ROOT / "pyproject.toml").read_text()
    ((listed,),) = [re.findall(r"^dependencies = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)]
    waiting = [(line, "") for line in re.findall(r'^ *"([^"]+)"', listed, re.MULTILINE)]
    seen: set[tuple[str, str]] = set()
    files: set[Path] = set()
    while waiting:
        line, extra = waiting.pop()
        requirement = Requirement(line)
        if (line, extra) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        seen.add((line, extra))
        distribution = metadata.distribution(requirement.name)
        folder = Path(str(distribution.locate_file("")))
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        files |= {folder / top for top in tops}
        waiting += [(of, part) for of in distribution.requires or () for part in ("", *requirement.extras)]
    return files


def build(folder: Path) -> Path:
    """The wheel, built from the sdist, which is built from a copy of the tracked files.

    Raises:
        FailedError: one cannot be built.
    """
    source = folder / "source"
    for name in run(["git", "ls-files", "-z"], cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    backend = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run([sys.executable, "-c", backend, "build_sdist", folder], cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    run([sys.executable, "-c", backend, "build_wheel", folder], cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def make(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command that makes an environment.

    Raises:
        UnavailableError: it failed because of this machine.
        FailedError: it failed otherwise.
    """
    try:
        run(command, cwd=cwd, env=env, seconds=_INSTALL_SECONDS)
    except FailedError as error:
        if reason := _UNAVAILABLE.search(str(error)):
            line = next(line for line in str(error).splitlines() if reason[0] in line)
            raise UnavailableError(f"the environment cannot be made here: {line[:300]}") from error
        raise


def compare_with_peer(peer: str, torch_args: Sequence[str]) -> None:
    """The tests that need the environment of a peer, with that there.

    Raises:
        UnavailableError: there is no registry.
        FailedError: it cannot be installed, or a test failed.
    """
    env = {"PYTHON": sys.executable, **os.environ, "TORCH_ARGS": " ".join(torch_args)}
    make([ROOT / "benchmarks" / "peer_env.sh", peer], cwd=ROOT, env=env)
    marks, tests = PEERS[peer]
    # Two files at a time: their tests wait for processes of their own.
    command = [sys.executable, "-m", "pytest", "-m", marks, "-rA", "-n", "2", "--dist", "loadfile", *tests]
    print(run(command, cwd=ROOT, seconds=_PEER_SECONDS), flush=True)


def attempt(environment: Environment, python: str, model: Path, folder: Path) -> None:
    """The quick start, a run of two steps and the doctor.

    Raises:
        FailedError: one of them failed.
    """
    changes: dict[str, str | None] = {
        "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(_hub(model, folder)), "PYTHONPATH": None, **environment.env
    }  # fmt: skip
    variables = {**os.environ, **{key: value for key, value in changes.items() if value is not None}}
    for key in [key for key, value in changes.items() if value is None]:
        variables.pop(key, None)
    verl = [*environment.before, python, "-m", "verl"]

    def call(*command: str, cwd: Path = folder) -> str:
        return run(list(command), cwd=cwd, env=variables)

    (folder / "quick_start.py").write_text(quick_start((ROOT / "README.md").read_text()))
    call(*environment.before, python, "quick_start.py")
    call(*verl, "init", "sums", "--model", str(model))
    (folder / "sums" / "letters.py").write_text(_REWARD)
    call(*verl, "train", "recipe.yaml", *_SETTINGS, cwd=folder / "sums")
    if not list(folder.glob("sums/runs/*/report.html")):
        raise FailedError("the run has no report")
    call(*verl, "doctor", "--timeout", "240")  # a busy machine is no finding


def quick_start(readme: str) -> str:
    """The first program of the README."""
    return re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)  # type: ignore[union-attr]


def _hub(model: Path, folder: Path) -> Path:
    """A cache of the hub in which `model` is called gpt2."""
    cached = folder / "hub" / "models--gpt2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, cached / "snapshots" / ("0" * 40))
    return cached.parent


def run(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = _TRIAL_SECONDS
) -> str:
    """What the command printed.

    Raises:
        FailedError: it failed, or took longer than `seconds`.
    """
    words = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, timeout=seconds, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{words}: not done after {seconds} s") from error
    if done.returncode:
        raise FailedError(f"{words}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def made_model(folder: Path) -> Path:
    """A tiny model, made by the Python that runs this script."""
    run([sys.executable, ROOT / "benchmarks" / "made_model.py", "tiny", folder / "model"], cwd=ROOT)
    # transformers 5 writes a class that 4 does not know.
    file = folder / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder / "model"


def try_one(environment: Environment, scratch: Path, model: Path, torch_args: Sequence[str]) -> None:
    """Make it and try it.

    Raises:
        UnavailableError: it cannot be made here.
        FailedError: it failed.
    """
    if environment.peer is not None:
        return compare_with_peer(environment.peer, torch_args)
    python: str | None = sys.executable
    if environment.version is not None:
        python = find_python(environment.version)
    if python is None:
        raise UnavailableError(f"there is no Python {environment.version} here")
    if environment.before and shutil.which(environment.before[0]) is None:
        raise UnavailableError(f"it needs {environment.before[0]}, or a user other than root")
    if environment.version is not None:
        python = install(environment, python, scratch / "venv", torch_args)
    elif environment.is_wheel:
        python = install_wheel(scratch / "venv")
    attempt(environment, python, model, scratch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments (default: all)")
    parser.add_argument("--torch-args", default=os.environ.get("TORCH_ARGS", ""), help="where pip takes torch from")
    parser.add_argument("--keep", action="store_true", help="leave the folders of environments that failed")
    options = parser.parse_args()
    failed = unavailable = False
    with tempfile.TemporaryDirectory(prefix="verl-environments-") as top:
        model = made_model(Path(top))
        known = environments(Path(top))
        if unknown := set(options.names) - known.keys():
            parser.error(f"there is no environment {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        for name in options.names or known:
            scratch, begun = Path(tempfile.mkdtemp(prefix=f"verl-{name}-")), time.monotonic()
            try:
                try_one(known[name], scratch, model, options.torch_args.split())
                outcome = "passed"
            except UnavailableError as error:
                unavailable, outcome = True, f"not tried: {error}"
            except FailedError as error:
                failed, outcome = True, f"FAILED: {error}" + (f"\nleft in {scratch}" if options.keep else "")
            if not (options.keep and outcome.startswith("FAILED")):
                shutil.rmtree(scratch)
            print(f"{name:>15}  {time.monotonic() - begun:5.0f} s  {outcome}", flush=True)
    sys.exit(1 if failed else _NOT_MADE if unavailable and options.names else 0)


if __name__ == "__main__":
    main()
