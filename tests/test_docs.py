"""What README and docs tell a reader to do works as it is written."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.agent_packages import openai_package
from tests.algorithms import plain_episodes
from verl.algorithms import algorithm_names, make_algorithm
from verl.cli.main import app
from verl.config import describe, load_config
from verl.config.other_names import NAMES

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_CONTINUED = re.compile(r"\s*\\\n\s*")


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, part = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if part:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in map(anchor, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_no_index_has_is_installed_from_a_clone(page: Path) -> None:
    """`verl-hybrid` is on none; README says what its messages mean, and the log is as it was written."""
    if page.name not in ("README.md", "log.md"):
        assert re.findall(r"pip install \S*verl\S*", page.read_text("utf-8")) == []


def settings() -> list[str]:
    text = _CONTINUED.sub(" ", (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8"))
    lines = [
        line.partition("  #")[0]
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    return [line.partition("verl train recipe.yaml")[2].strip() for line in lines if "verl train recipe.yaml" in line]


def test_settings_that_pages_name_are_there() -> None:
    """`section.key` or `section.key=value` in a page; below `algorithm` an option of some algorithm."""
    keys = {key.path for key in describe()} | set(NAMES)
    options = {field.name for name in algorithm_names() for field in fields(type(make_algorithm(name)))}
    of_a_file = ("faq.md", "metrics.md", "debugging.md", "reward_does_not_move.md", "gsm8k.md", "models.md")
    for page in (ROOT / name for name in script("plain_words").GUIDES):
        sections = r"data|algorithm|rollout|actor_rollout_ref"
        if page.name in of_a_file:  # elsewhere `trainer` is an object of Python, too
            sections += "|trainer"
        for found in re.findall(rf"`((?:{sections})\.(?!py\b|md\b)[\w.]+)", page.read_text("utf-8")):
            name = f"actor_rollout_ref.{found}" if found.startswith("rollout.") else found
            is_option = name.startswith("algorithm.") and name.partition(".")[2] in options
            is_section = any(key.startswith(f"{name}.") for key in keys)
            assert name in keys or is_option or is_section, f"{page.name} names {found}"


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("given", settings())
def test_settings_of_how_do_i_are_taken(given: str, tmp_path: Path) -> None:
    written = CliRunner().invoke(app, ["init", str(tmp_path / "sums")])
    assert written.exit_code == 0, f"{written.output}{written.exception!r}"
    load_config(tmp_path / "sums" / "recipe.yaml", [one for one in shlex.split(given) if not one.startswith("--")])


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_each_symptom_names_metrics_that_there_are() -> None:
    meanings = script("metric_meanings").meanings((ROOT / "docs" / "metrics.md").read_text("utf-8"))
    rows = [line.split(" | ") for line in (ROOT / "docs" / "reward_does_not_move.md").read_text("utf-8").splitlines()]
    symptoms = [row for row in rows if len(row) == 3][1:]
    assert len(symptoms) == 11
    for symptom, metric, _ in symptoms:
        names = re.findall(r"`([^`]+)`", metric)
        assert names, symptom
        assert [name for name in names if not any(fnmatch(name, known) for known in meanings)] == [], symptom


@pytest.fixture
def gsm8k(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own program and recipe, in this folder, with rows of GSM8K's form."""
    monkeypatch.chdir(tmp_path)
    Path("gsm8k/main").mkdir(parents=True)
    for split, count in (("train", 8), ("test", 4)):
        rows = [
            {"question": f"Ann has {i} eggs and finds {count}. How many?", "answer": f"She has\n#### {i + count}"}
            for i in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), f"gsm8k/main/{split}-00000-of-00001.parquet")
    (program,) = blocks("docs/gsm8k.md", "python")
    exec(compile(program, "prepare.py", "exec"), {"__name__": "prepare"})
    assert pq.read_table("test.parquet").column_names == ["prompt", "answer"]
    (recipe,) = blocks("docs/gsm8k.md", "yaml")
    Path("gsm8k.yaml").write_text(recipe.replace("Qwen/Qwen2.5-0.5B-Instruct", json.dumps(str(tiny))))


@pytest.mark.slow
def test_gsm8k_from_zero_with_a_made_sample(gsm8k: None) -> None:
    checked = CliRunner().invoke(app, ["train", "gsm8k.yaml", "--dry-run"])
    assert checked.exit_code == 0, checked.output


@pytest.mark.slow
def test_gsm8k_is_evaluated(gsm8k: None, tiny: Path) -> None:
    evaluated = ["eval", str(tiny), "test.parquet", "data.chat=false", "--reward", "math", "-n", "2", "--limit", "2"]
    result = CliRunner().invoke(app, [*evaluated, "actor_rollout_ref.rollout.max_new_tokens=4"])
    assert result.exit_code == 0 and "pass@2" in result.stdout, result.output


@pytest.mark.quick("README.md")
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_program_of_the_page_runs(tiny: Path, page: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (program, *_) = blocks(page, "python")
    exec(compile(program.replace('"gpt2"', repr(str(tiny))).replace("range(10)", "range(2)"), page, "exec"), {})
    assert list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_the_readme_counts_the_algorithms() -> None:
    own = [name for name in algorithm_names() if type(make_algorithm(name)).__module__.startswith("verl.")]
    assert f"[{len(own)} algorithms](docs/algorithms.md)" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_the_table_of_models_is_what_the_planner_says() -> None:
    table = script("model_table")
    page = table.PAGE.read_text("utf-8")
    assert table.written(page) == page


def test_sentences_of_readme_and_guides_are_short() -> None:
    words = script("plain_words")
    for page in words.GUIDES:
        lengths = [len(each.split()) for each in words.sentences((ROOT / page).read_text("utf-8"))]
        assert median(lengths) <= 18 and sum(length < 32 for length in lengths) >= 0.95 * len(lengths), page


class _Display:
    """What a notebook shows, kept: the front end is not what is tried here. Its button is pressed after so many."""

    interrupt_after = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.shown: list[Any] = []

    def update(self, value: Any) -> None:
        self.shown.append(value)
        if len(self.shown) == self.interrupt_after:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("interrupt_after", [0, 2])
def test_the_notebook_of_first_steps_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt_after: int
) -> None:
    cells = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text("utf-8"))["cells"]
    assert len(cells) <= 12
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIRST_STEPS_MODEL", str(tiny))
    monkeypatch.setenv("FIRST_STEPS", "3")
    monkeypatch.setattr(_Display, "interrupt_after", interrupt_after)
    front = ModuleType("IPython.display")
    front.HTML, front.display = str, _Display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", front)
    scope: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), scope)
    assert len(scope["rewards"]) == (interrupt_after or 3)
    assert scope["trainer"].steps == len(scope["rewards"]) + 1  # and one after the checkpoint
    assert "<polyline" in scope["shown"].shown[-1]


def test_the_agent_of_the_tutorial_is_trained(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, in order; the reward is another one, as a model of random weights says no price."""
    pytest.importorskip("aiohttp")
    names: dict[str, Any] = {"__name__": "train"}
    monkeypatch.chdir(tmp_path)
    price, other = 'PRICES[row["item"]] in (message.content or "")', 'len(message.content or "") % 2'
    with openai_package():
        agent, training = blocks("docs/agents.md", "python")
        assert agent.count(price) == 1
        (tmp_path / "shop.py").write_text(agent.replace(price, other), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "shop", raising=False)
        exec(training.replace("models/SmolLM2-135M-Instruct", str(tiny)), names)
        del sys.modules["shop"]
    assert names["trainer"].steps == 2 and (tmp_path / "runs" / "shop" / "metrics.jsonl").exists()


def test_the_page_of_semantics_has_the_code_of_the_reference() -> None:
    *quoted, example = blocks("docs/agent_semantics.md", "python")
    source = Path(plain_episodes.__file__).read_text(encoding="utf-8")
    assert len(quoted) == 4 and all(block in source for block in quoted)
    names = dict(vars(plain_episodes))
    exec(example, names)
    episodes = names["episodes"]
    advantages = plain_episodes.advantages("dr_grpo", episodes)
    assert advantages == {("a", 0): 0.5, ("a", 1): 0.5, ("a", 2): 0.5, ("b", 3): -0.5}
    for mode, first, second in (("token-mean", 1 / 4, 1 / 4), ("seq-mean-token-mean", 1 / 6, 1 / 2)):
        weights = plain_episodes.weights(mode, episodes, [*advantages])
        assert [*weights.values()] == [first] * 3 + [second]
