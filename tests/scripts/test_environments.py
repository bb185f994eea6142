"""Which environments cannot be made on a machine, and which are broken."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "environments.py"


@pytest.fixture(scope="module")
def environments() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environments", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["environments"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "unavailable"),
    [
        (["--index-url", "http://127.0.0.1:9/simple", "--retries", "0", "torch"], True),
        (["--index-url", "http://127.0.0.1:9/simple", "--retries", "1", "--timeout", "1", "wheel"], True),
        (["--no-index", "--find-links", "{here}", "some_package>=2"], False),
    ],
)
def test_no_registry_is_no_failure_and_no_such_version_is(
    environments: ModuleType, tmp_path: Path, options: list[str], unavailable: bool
) -> None:
    (tmp_path / "some_package-1.0-py3-none-any.whl").touch()
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--target", str(tmp_path / "into")]
    env = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
    error = environments.UnavailableError if unavailable else environments.FailedError
    with pytest.raises(error) as caught:
        environments.make([*pip, *(option.format(here=tmp_path) for option in options)], cwd=tmp_path, env=env)
    assert ("cannot be made here" in str(caught.value)) is unavailable


def test_a_python_that_is_not_there_is_said(
    environments: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["environments.py", "python3.12"])
    # The tiny model is not reached.
    monkeypatch.setattr(environments, "made_model", lambda folder: folder)
    with pytest.raises(SystemExit) as end:
        environments.main()
    assert end.value.code == 77 and "not tried: there is no Python 3.12 here" in capsys.readouterr().out


def test_each_turn_of_continuous_integration_names_environments_that_exist(
    environments: ModuleType, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("ci", SCRIPT.with_name("ci.py"))
    assert spec is not None and spec.loader is not None
    ci = sys.modules["ci"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ci)
    assert sorted(name for names in ci.ENVIRONMENTS for name in names) == sorted(environments.environments(tmp_path))
    assert ci.NOT_MADE == environments._NOT_MADE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_with_core_dependencies_alone_and_without_a_compiler(
    environments: ModuleType, tmp_path: Path
) -> None:
    """Outside of the source tree: the README's first program, a new recipe for two steps, the doctor."""
    (tmp_path / "paths").mkdir()
    environment = environments.environments(tmp_path / "paths")["wheel"]
    environments.try_one(environment, tmp_path, environments.made_model(tmp_path), [])
    python = str(tmp_path / "venv" / "bin" / "python")
    code = "import verl; from importlib.util import find_spec as f; print(verl.__file__, f('pytest'), f('peft'))"
    said = environments.run([python, "-c", code], cwd=tmp_path, env={})
    assert said.startswith(str(tmp_path / "venv")) and said.endswith("None None\n")
