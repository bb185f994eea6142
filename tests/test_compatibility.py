"""What versions of before have written is read; what a newer one has written is refused by name, and left as it is.

`run_of_before` was written by the commit before schema versions: a run of two steps by `verl train recipe.yaml
trainer.total_steps=2`, and the metrics of two more.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import verl
from tests.conftest import IDS, byte_tokenizer
from verl._base.schemas import CHECKPOINT, RUN, SETTINGS, Schema
from verl.checkpoint.store import dump_manifest, load_checkpoint
from verl.checkpoint.verify import verify
from verl.cli.main import app
from verl.config import build_config, commented_yaml, load_config, load_tasks, run_id
from verl.errors import CheckpointError, ConfigError, DamagedCheckpointError
from verl.report.compare import write_comparison
from verl.report.page import write_report
from verl.report.sinks import open_logger, set_aside
from verl.run.export import export
from verl.run.folder import open_run
from verl.run.train import train

BEFORE = Path(__file__).parent / "run_of_before"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of before, with its recipe in the working directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    for name in ("recipe.yaml", "reward.py", "prompts.jsonl"):
        shutil.copy(BEFORE / name, tmp_path)
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**IDS, **sizes, num_key_value_heads=1, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.float64).save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    return Path(shutil.copytree(BEFORE / "run", tmp_path / "runs" / run_id(load_config("recipe.yaml"))))


def contents(root: Path) -> dict[str, str]:
    """Digests of all files below a directory."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rewrite_manifest(checkpoint: Path, **changes: object) -> None:
    """Change what a manifest says, with a digest that is right."""
    manifest = {**json.loads((checkpoint / "manifest.json").read_text()), **changes}
    del manifest["digest"]
    (checkpoint / "manifest.json").write_bytes(dump_manifest(manifest))


def test_a_run_of_before_goes_on_as_the_version_of_before_would(run: Path) -> None:
    assert not (run / "run.json").exists()
    train(load_config("recipe.yaml", ["trainer.total_steps=4"]))
    assert json.loads((run / "run.json").read_text()) == {"schema": 1}
    first, rows = (run / "metrics.jsonl").read_text(), (BEFORE / "run" / "metrics.jsonl").read_text()
    assert first.startswith(rows)
    continued = [json.loads(line) for line in first.splitlines()[2:]]
    expected = [json.loads(line) for line in (BEFORE / "continued.jsonl").read_text().splitlines()]
    assert len(continued) == len(expected) == 2
    for row, before in zip(continued, expected, strict=True):
        assert {name: row[name] for name in before} == pytest.approx(before, rel=1e-9, abs=1e-9)


def test_a_checkpoint_of_before_is_loaded_to_the_last_bit(run: Path, tmp_path: Path) -> None:
    saved = run / "checkpoints" / "step-000002"
    assert verify(saved).ok
    actor = verl.Actor("model", dtype="float64", optim={"lr": 1e-2})
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [0.0] * len(texts), algorithm="rloo", log_dir=False)
    trainer.load_checkpoint(saved)
    assert trainer.steps == 2
    trainer.save_checkpoint(tmp_path / "again")
    before, after = contents(saved), contents(tmp_path / "again")
    tokenizer = {
        name for name in after if name.startswith("actor/tokenizer/")
    }  # which the version of before did not save
    assert tokenizer and before.keys() == after.keys() - tokenizer
    tensors = [name for name in before if name.endswith(".safetensors")]
    assert len(tensors) == 3 and [before[name] for name in tensors] == [after[name] for name in tensors]
    old, new = load_checkpoint(saved), load_checkpoint(tmp_path / "again")
    assert new.json("trainer.json") == old.json("trainer.json")
    assert new.batch("buffer.parquet") == old.batch("buffer.parquet")


def test_a_newer_checkpoint_is_refused_by_name_and_left_alone(run: Path, tmp_path: Path) -> None:
    newer = run / "checkpoints" / "step-000002"
    rewrite_manifest(newer, format=CHECKPOINT.current + 1, writer={"verl": "9.0"})
    before = contents(newer)
    words = r"step-000002 has format 5, and .* reads format 4: it was written by a newer version: install that one"
    readers: list[Callable[[], object]] = [
        lambda: load_checkpoint(newer),
        lambda: export(run, tmp_path / "out"),
        lambda: train(load_config("recipe.yaml", ["trainer.total_steps=4"])),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match=words) as refused:
            read()
        assert not isinstance(refused.value, DamagedCheckpointError)
    assert "newer version" in str(verify(newer))
    assert contents(newer) == before
    assert not (tmp_path / "out").exists()
    (newer / "manifest.json").write_text((newer / "manifest.json").read_text().replace("9.0", "9.1"))
    with pytest.raises(DamagedCheckpointError, match="has been cut or changed"):
        load_checkpoint(newer)


def test_a_newer_run_directory_is_refused_by_name_and_left_alone(run: Path, tmp_path: Path) -> None:
    (run / "run.json").write_text('{"schema": 2, "parts": []}')
    before = contents(tmp_path)
    config = load_config("recipe.yaml", ["trainer.total_steps=4"])
    readers: list[Callable[[], object]] = [
        lambda: train(config),
        lambda: write_report(run),
        lambda: write_comparison([run], tmp_path / "page.html"),
        lambda: export(run, tmp_path / "out"),
    ]
    for read in readers:
        with pytest.raises(ConfigError, match=r"run directory .* has schema 2, and .* reads schema 1: .*newer version"):
            read()
    assert contents(tmp_path) == before
    with open_run("runs", run_id(config), fresh=True) as anew:
        assert anew.status == "anew"
    assert contents(run.with_name(f"{run.name}.1")) == contents(BEFORE / "run") | {
        "run.json": before[f"runs/{run.name}/run.json"]
    }


@pytest.mark.parametrize("raw", ["", "[]", '{"schema": "1"}', '{"schema": true}', '{"schema": 0}', "{}"])
def test_a_damaged_version_of_a_run_is_named(tmp_path: Path, raw: str) -> None:
    with open_run(tmp_path, "run-1"):
        pass
    (tmp_path / "run-1" / "run.json").write_text(raw)
    with pytest.raises(ConfigError, match=r"run\.json is damaged|schema must be a whole number of at least 1"):
        open_run(tmp_path, "run-1")


def test_what_a_trainer_logs_says_its_version_and_keeps_it_when_set_aside(tmp_path: Path) -> None:
    log = open_logger(tmp_path, ())
    log.log(1, {"loss": 1.0})
    log.close()
    set_aside(tmp_path)
    assert json.loads((tmp_path / "earlier-1" / "run.json").read_text()) == {"schema": RUN.current}
    assert not (tmp_path / "run.json").exists()


RECIPE = {"actor_rollout_ref": {"model": {"path": "m"}}, "data": {"train": "p.jsonl"}}


def test_settings_without_a_version_are_of_the_first_and_it_is_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"schema": 1, **RECIPE}))
    assert load_config(file) == build_config(RECIPE)
    assert load_config(None, ["actor_rollout_ref.model.path=m", "data.train=p.jsonl", "schema=1"]) == build_config(
        RECIPE
    )
    assert run_id(load_config(file)) == run_id(build_config(RECIPE))


@pytest.mark.parametrize("version", [2, 10**9])
def test_newer_settings_are_refused_by_name(tmp_path: Path, version: int) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "new": {"key": 1}, "schema": version}, sort_keys=False))
    words = rf"recipe\.yaml .*line 8\) has schema {version}, and this version of verl reads schema 1: .*newer version"
    with pytest.raises(ConfigError, match=words):
        load_config(file)
    with pytest.raises(ConfigError, match=words):
        load_tasks(file)
    shown = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert shown.exit_code == 2 and "has schema" in shown.stderr


@pytest.mark.parametrize("version", ["one", True, 0, -1, 1.0, None, [1], {}])
def test_a_version_of_settings_that_is_none_is_named(version: object) -> None:
    if version is None:
        assert build_config({"schema": None, **RECIPE}) == build_config(RECIPE)
        return
    with pytest.raises(ConfigError, match="schema must be a whole number of at least 1"):
        build_config({"schema": version, **RECIPE})


def test_what_is_written_says_its_version(tmp_path: Path) -> None:
    said = f"schema: {SETTINGS.current} "
    assert commented_yaml().startswith(said)
    shown = CliRunner().invoke(app, ["init", str(tmp_path / "sums"), "--model", "m"])
    assert shown.exit_code == 0, shown.output
    assert f"\n{said}" in (tmp_path / "sums" / "recipe.yaml").read_text()
    load_config(tmp_path / "sums" / "recipe.yaml")
    with open_run(tmp_path, "run-1", config=verl.config.to_yaml(build_config(RECIPE))) as run:
        assert (run.path / "config.yaml").read_text().startswith(said.strip() + "\n")
        assert json.loads((run.path / "run.json").read_text()) == {"schema": RUN.current}


def test_the_page_has_the_versions_of_every_form() -> None:
    rows = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in (BEFORE.parents[1] / "docs" / "compatibility.md").read_text().splitlines()
        if line.startswith("|")
    }
    for what, schema in (("checkpoint", CHECKPOINT), ("run directory", RUN), ("settings in YAML", SETTINGS)):
        read = str(schema.current) if schema.oldest == schema.current else f"{schema.oldest} to {schema.current}"
        assert [row[2:] for row in rows if row[0] == what] == [(str(schema.current), read)]


def test_a_version_that_is_read_no_longer_says_so() -> None:
    schema = Schema("schema", current=5, oldest=3, error=ConfigError, instead="start anew")
    for version in (3, 4, 5):
        schema.check(version, "it")
    for version in (None, 1, 2):
        with pytest.raises(ConfigError, match=r"it has schema \d, .* reads schema 3 to 5: go on with the version that"):
            schema.check(version, "it")
    with pytest.raises(ConfigError, match="newer version"):
        schema.check(6, "it")
