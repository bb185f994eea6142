"""Files of models, settings and runs with one value changed: they are taken, or refused by name; no bare error."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import save_tiny
from tests.properties import examples
from tests.trainer.runs import settings
from verl.batch import Batch
from verl.config import build_config, load_config, to_yaml
from verl.config.load import load_tasks
from verl.errors import ModelError, VerlError
from verl.models.loading import configured_model, load_model, load_tokenizer, resolved_dtype
from verl.models.options import ModelOptions
from verl.report.compare import write_comparison
from verl.report.page import write_report
from verl.run.planned import model_size

WRONG: list[Any] = [
    None, True, -1, 0, 0.5, 2**70, 1e12, float("nan"), "x", "", "9" * 30, [], [["x"]], {}, {"a": {"b": []}},
]  # fmt: skip
NO_JSON = [
    b"", b"{", b"null", b"[1]", b'"x"', b"\xff\xfe", b"\x00", b"9" * 5000, b"[" * 200_000 + b"]" * 200_000,
    b'{"a": ' * 5000, b"a: &a [*a]", b"? [1]\n: 2", b"a: !!python/object:os.system x", b'{"step": 1e999}', b'"\\ud800"',
]  # fmt: skip


def mutated(value: Any) -> Iterator[Any]:
    """Every copy of a JSON value in which one part has become something else."""
    yield from WRONG
    for key in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for part in mutated(value[key]):
            copy = value.copy()
            copy[key] = part
            yield copy


def some(value: Any, count: int) -> list[Any]:
    """`count` of the mutations; all of them in the slow tests."""
    found = [*mutated(value)]
    # A model of so many layers is refused by nothing, and made until memory is full.
    found = [item for item in found if not isinstance(item, dict) or item.get("num_hidden_layers") not in (2**70, 1e12)]
    share = examples(100).max_examples / 100
    return found if share == 1 else random.Random(0).sample(found, min(count, len(found)))


def accepted(action: Callable[[], object], about: object) -> bool:
    """Whether it is taken; else it is refused by name. Any other error fails the test."""
    try:
        action()
    except VerlError:
        return False
    except Exception as error:
        raise AssertionError(f"{about!r:.200}: {type(error).__name__}: {error}") from error
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("mutated") / "model")


def read_all(model: Path) -> None:
    load_tokenizer(model)
    load_model(model)


READERS = {
    "config.json": [
        load_model,
        lambda path: configured_model(path, dtype="auto", kind="causal"),
        lambda path: resolved_dtype(path, "auto"),
        lambda path: model_size(ModelOptions(path=str(path))),
    ],
    "generation_config.json": [load_model],
    "tokenizer_config.json": [load_tokenizer],
    "tokenizer.json": [load_tokenizer],
}


@pytest.mark.parametrize("name", READERS)
def test_files_of_models(model: Path, name: str) -> None:
    file = model / name
    good = file.read_bytes()
    content = json.loads(good)
    if name == "tokenizer.json":
        content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:5])
    taken = []
    try:
        for raw in [*NO_JSON, *(json.dumps(item).encode() for item in some(content, 25))]:
            file.write_bytes(raw)
            for reader in READERS[name]:
                taken.append(accepted(lambda read=reader: read(model), raw))
    finally:
        file.write_bytes(good)
    assert False in taken
    read_all(model)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("wrong", ["x", 1e12, 2**40, -1, True, [1]])
def test_a_size_that_is_none_is_named_by_the_planner(model: Path, tmp_path: Path, key: str, wrong: object) -> None:
    content = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, key: wrong}))
    with pytest.raises(ModelError, match=key.replace("_", "[ _]")):
        model_size(ModelOptions(path=str(tmp_path)))


def test_what_transformers_did_not_expect_is_named(model: Path) -> None:
    file = model / "config.json"
    good = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(good), "num_attention_heads": 0}))
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_model(model)
    finally:
        file.write_text(good)


def test_files_of_settings(tmp_path: Path) -> None:
    full = yaml.safe_load(to_yaml(build_config(settings(tmp_path, tmp_path / "model"))))
    file = tmp_path / "run.yaml"
    texts = [*NO_JSON, *(yaml.safe_dump(item).encode() for item in some(full, 25))]
    for raw in texts:
        file.write_bytes(raw)
        accepted(lambda: load_config(file), raw)
    file.write_text(yaml.safe_dump(full))
    for override in (
        "=",
        "a",
        "=1",
        "trainer..seed=1",
        "trainer[0]=1",
        "trainer={a",
        "trainer.seed=" + "9" * 5000,
        "a\0=1",
    ):
        assert not accepted(lambda text=override: load_config(file, [text]), override)
    task = {"name": "a", "type": "ppo", "reward_model": "rm_hf", "reward_config": {"model_name": "x"}}
    guarded = {"name": "b", "constraint_model": "fact_checker", "constraint_config": {"model_name": "m"}}
    for item in some({"tasks": [task, guarded]}, 40):
        file.write_text(yaml.safe_dump(item))
        accepted(lambda: load_tasks(file), item)


def make_run(folder: Path) -> Path:
    """A run directory with one of each file."""
    for part in ("logs", "completions"):
        (folder / part).mkdir(parents=True)
    rows = [{"step": i, "reward/mean": 0.1 * i, "time/step": 1.0, "task/a/reward/mean": 0.3} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evals = [{"step": i, "headline": "reward", "problems": 6, "low": 0.1, "high": 0.4, "reward": 0.2} for i in (0, 3)]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    summary = {"state": "finished", "steps": 3, "seconds": 3.0, "headline": "reward", "reward_before": 0.1, "gain": 0.1}
    (folder / "summary.json").write_text(json.dumps({**summary, "gain_low": 0.0, "gain_high": 0.2, "control": None}))
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"seed": 1, "total_steps": 3}}))
    (folder / "environment.json").write_text(json.dumps({"verl": "0", "threads": 1}))
    (folder / "run.json").write_text(json.dumps({"schema": 1}))
    (folder / "logs" / "001.log").write_text("begun\n")
    columns = {"prompt": ["q"], "response": ["r"], "reward": [0.5], "finish": ["stop"], "advantage": [0.1]}
    for name in ("step-000000", "step-000003", "train-000002"):
        Batch.from_columns({"id": ["a"], **columns}).to_parquet(folder / "completions" / f"{name}.parquet")
    return folder


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "name",
    ["run.json", "summary.json", "environment.json", "metrics.jsonl", "eval.jsonl", "config.yaml", "logs/001.log",
     "completions/step-000000.parquet"],
)  # fmt: skip
def test_files_of_runs(tmp_path: Path, name: str) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    file = run / name
    good = file.read_bytes()

    def show() -> None:
        write_report(run)
        write_comparison([run, other], tmp_path / "both.html")

    texts = [*NO_JSON]
    if name.endswith((".json", ".jsonl")):
        head, *lines = good.decode().splitlines()
        texts += ["\n".join([json.dumps(item), *lines]).encode() for item in some(json.loads(head), 12)]
    for raw in texts:
        file.write_bytes(raw)
        accepted(show, raw)
    file.unlink()
    for make in (
        file.mkdir,
        lambda: os.mkfifo(file),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(file),
    ):
        make()
        accepted(show, name)
        file.rmdir() if file.is_dir() else file.unlink()
    file.write_bytes(good)
    assert accepted(show, name)
