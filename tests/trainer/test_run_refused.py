"""What `verl train` refuses: what needs no model before anything is made, the rest before the first step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import (
    rows,
    run_dir,
    settings,
)
from verl._host import user_functions as loading
from verl.config import build_config
from verl.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError
from verl.run.build import check_settings
from verl.run.train import train

HERE = Path(__file__).parents[1]
AGENT = f"{HERE}/trainer/refused_agents.py:gateway"
SHOP = f"{HERE}/trainer/refused_agents.py:shop"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, tiny: Path, make_tiny: Any) -> None:
    train(build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 2})))
    checkpoint = run_dir(tmp_path) / "checkpoints" / "latest"
    import verl

    other = verl.Trainer(str(make_tiny("qwen2")), reward_fn=len, algorithm="grpo", log_dir=False)
    with pytest.raises(CheckpointError, match="Llama"):
        other.load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"actor_rollout_ref.model.path": "/nowhere/at/all"}, Exception, "/nowhere/at/all"),
        ({"data.train": "absent.jsonl"}, DataError, "absent.jsonl"),
        ({"algorithm.name": "grppo"}, ConfigError, "grpo"),
        ({"algorithm.clip_ratoi": 0.2}, ConfigError, "clip_ratio"),
        ({"data.max_prompt_length": 5}, DataError, "longer than 5 tokens"),
        ({"reward.path": "absent.py:f"}, ConfigError, "absent.py"),
        ({"data.train": None}, ConfigError, "data.train"),
    ],
)
def test_bad_input_is_refused_in_plain_words(
    tmp_path: Path, tiny: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(build_config(settings(tmp_path, tiny, **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_rollout_ref.model.path": "/nowhere/at/all"}, "actor_rollout_ref.model.path: there is no directory"),
        ({"data.train": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"data.eval": "absent.jsonl"}, "absent.jsonl does not exist"),
        ({"data.train": {"task": "chain_sums"}}, "did you mean 'chain_sum'"),
        ({"data.train": None}, "data.train is missing"),
        ({"algorithm.name": "rlo"}, "did you mean 'rloo'"),
        ({"algorithm.kl_coeff": 0.1}, "did you mean 'kl_coef'"),
        ({"algorithm.name": "dpo", "reward.path": None}, "none of: pairs"),
        ({"reward.path": "absent.py:f"}, "absent.py does not exist"),
        ({"reward.path": None, "reward.name": "code", "reward.answer": "tag"}, "has no option 'answer'"),
        ({"actor_rollout_ref.rollout.episode": "absent.py:f"}, "absent.py does not exist"),
        ({"trainer.eval_metrics": ["absent.py:f"]}, "absent.py does not exist"),
        ({"trainer.loggers": ["wandb"]}, "pip install"),
        (
            {"actor_rollout_ref.ref.path": "a/model", "algorithm.name": "rloo"},
            "has no reference .* set algorithm.kl_in",
        ),
        ({"trainer.max_staleness": 1, "algorithm.rollout_is": None}, "does not correct"),
        ({"trainer.max_staleness": 1, "actor_rollout_ref.rollout.episode": AGENT}, "leave max_staleness out, or"),
        ({"trainer.max_staleness": 1, "actor_rollout_ref.rollout.environment": SHOP}, "leave max_staleness out, or"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_needs_no_model_is_found_before_anything_is_made(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of a package that is absent meets
    config = build_config(settings(tmp_path, tiny, **changes))
    for begin in (check_settings, train):  # the dry run's, and the run's
        with pytest.raises((ConfigError, DataError), match=words):
            begin(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("error", [ConfigError, DataError, RewardError])
def test_the_cause_of_what_the_user_can_mend_is_not_shown(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Any
) -> None:
    def failing(*args: Any) -> None:
        raise error("told in one message") from ValueError("somewhere below")

    monkeypatch.setattr("verl.run.train.build_data", failing)
    with pytest.raises(error):
        train(build_config(settings(tmp_path, tiny)))
    assert ("Traceback" in capsys.readouterr().err) == (error is RewardError)
    logs = [log.read_text() for log in (tmp_path / "runs").glob("latest/logs/001.log")]
    assert ["Traceback" in log for log in logs] == [True] * (error is RewardError)


def test_a_run_that_cannot_begin_leaves_no_directory(tmp_path: Path, tiny: Path) -> None:
    no_eval = {"data.eval": None, "trainer.eval_every": None, "trainer.total_steps": 1}
    train(build_config(settings(tmp_path, tiny, **no_eval)))
    runs, before = tmp_path / "runs", run_dir(tmp_path)

    def there() -> list[str]:
        return sorted(path.name for path in runs.iterdir() if not path.name.startswith("."))

    listed = there()
    for changes in (
        {"actor_rollout_ref.model.path": "nobody/nothing-of-that-name"},
        {"data.max_prompt_length": 1},
    ):
        with pytest.raises((ConfigError, DataError, ModelError)):
            train(build_config(settings(tmp_path, tiny, **no_eval, **changes)))
        assert there() == listed and run_dir(tmp_path) == before


@pytest.mark.slow
def test_a_finished_run_stays_if_the_next_cannot_begin(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 1, "trainer.eval_every": None}))
    train(config)
    summary = (run_dir(tmp_path) / "summary.json").read_text()

    def failing(*args: Any) -> None:
        raise DataError("no such data")

    monkeypatch.setattr("verl.run.train.build_data", failing)
    with pytest.raises(DataError):
        train(config)
    assert (run_dir(tmp_path) / "summary.json").read_text() == summary
    assert not run_dir(tmp_path).with_name(f"{run_dir(tmp_path).name}.1").exists()


def test_an_edited_reward_is_another_run_unless_it_is_accepted(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"data.eval": None, "trainer.eval_every": None}
    config = build_config(settings(tmp_path, tiny, **changes))
    file = tmp_path / "reward.py"

    def begin(steps: int, **options: bool) -> None:
        for name in ("user_modules", "_imported", "_returned"):  # as a process of its own has them
            monkeypatch.setattr(loading, name, {})
        loading.elsewhere.clear()
        train(config.replace(trainer=config.trainer.replace(total_steps=steps)), **options)

    begin(1)
    file.write_text(file.read_text() + "\n# another\n")
    with pytest.raises(ConfigError, match=r"reward\.py has changed since this run began"):
        begin(2)
    assert len(rows(run_dir(tmp_path))) == 1
    begin(2, accept_edits=True)
    assert len(rows(run_dir(tmp_path))) == 2
    (edit,) = json.loads((run_dir(tmp_path) / "code.json").read_text())["edits"]
    assert edit["file"].endswith("reward.py") and edit["before"] != edit["after"]


@pytest.mark.parametrize("recorded", [False, True])
def test_other_held_out_data_are_refused(tmp_path: Path, tiny: Path, recorded: bool) -> None:
    pairs = {"algorithm.name": "dpo", "reward.path": None} if recorded else {}
    short = settings(tmp_path, tiny, **pairs, **{"trainer.total_steps": 1, "trainer.eval_every": None})
    longer = {**short, "trainer": {**short["trainer"], "total_steps": 2}}
    pair = {"chosen": "aaaa", "rejected": "zzzz"} if recorded else {}
    for name in ("train", "eval"):
        lines = [json.dumps({"prompt": f"{name} {i}: ", **pair}) + "\n" for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    train(build_config(short))
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(held_out.read_text().replace("eval 1", "eval 9"))
    summary = (run_dir(tmp_path) / "summary.json").read_text()
    with pytest.raises(DataError, match=r"data\.eval \(.*eval\.jsonl\) is not what the run began with.*--fresh"):
        train(build_config(longer))
    assert (run_dir(tmp_path) / "summary.json").read_text() == summary, "a run that is refused is as it was"
    held_out.write_text(held_out.read_text().replace("eval 9", "eval 1"))
    train(build_config(longer))


def test_a_prompt_beyond_the_models_positions_is_refused_before_the_start(tmp_path: Path, make_tiny: Any) -> None:
    configuration = settings(tmp_path, make_tiny("gpt2"))
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "long " * 80}) + "\n")
    with pytest.raises(DataError, match="row 12 with 400"):
        train(build_config(configuration))
