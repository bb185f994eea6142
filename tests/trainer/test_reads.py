"""What rewards, metrics and tasks read is asked of the first rows, before a model is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from verl.config import build_config
from verl.errors import ConfigError, DataError, RewardError
from verl.run.build import check_settings

ROWS = [{"prompt": f"1+{i}", "answer": str(1 + i), "level": i} for i in range(3)]
CODE = """
def exact(responses, answer): return [float(r == a) for r, a in zip(responses, answer)]
def lacks(responses, anwser): return [0.0] * len(responses)
def compute_score(data_source, solution_str, ground_truth): return 0.0
def length(texts): return [len(text) for text in texts]
def accept(text, row): return True
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Settings of a run; the model's directory is empty, so that nothing can be loaded from it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.py").write_text(CODE)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({**row, "split": name}) + "\n" for row in ROWS))

    def settings(**sections: Any) -> dict[str, Any]:
        data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "batch_size": 2}
        made = json.loads(json.dumps(sections).replace("mine.py", str(tmp_path / "mine.py")))
        return {
            "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
            "algorithm": {"name": "grpo"},
            "trainer": {"output_dir": str(tmp_path / "runs")},
            **made,
            "data": {**data, **made.get("data", {})},
        }

    return settings


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"path": "mine.py:lacks"}}, r"data\.train .*reward 'lacks' needs a column 'anwser'.*mean 'answer'"),
        ({"reward": {"path": "mine.py:compute_score"}}, "needs a column 'data_source'"),
        ({"reward": {"name": "task"}}, r"data\.train .*reward 'task' verifies.*procedural tasks"),
        ({"reward": {"components": {"a": {"path": "mine.py:exact"}, "b": {"name": "task"}}}}, "procedural tasks"),
        (
            {"reward": {"path": "mine.py:exact"}, "trainer": {"eval_metrics": ["mine.py:lacks"]}},
            r"data\.eval .*metric '.*mine\.py:lacks' needs a column 'anwser'",
        ),
        (
            {"reward": {"path": "mine.py:lacks"}, "data": {"train": {"task": "chain_sum", "size": 4}, "eval": None}},
            "reward 'lacks' needs a column 'anwser'",
        ),
    ],
)
def test_a_column_that_is_missing_is_named(run: Callable[..., Any], sections: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_settings(build_config(run(**sections)))


def test_code_without_tests_is_named(run: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="reward 'code' reads the column tests or reference, and the data have none"):
        check_settings(build_config(run(reward={"name": "code"})))


def test_held_out_rows_are_asked_too(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "2+2", "solution": "4"}\n')
    settings = run(reward={"path": "mine.py:exact"}, data={"eval": str(tmp_path / "other.jsonl")})
    with pytest.raises(DataError, match=r"data\.eval \(.*other\.jsonl\): reward 'exact' needs a column 'answer'"):
        check_settings(build_config(settings))
    check_settings(build_config(run(reward={"path": "mine.py:exact"}, trainer={"eval_metrics": ["mine.py:exact"]})))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"reward_model": "mine.py:lacks"}, r"data\.train.*reward 'lacks' needs a column 'anwser'"),
        ({"reward_model": {"x": {"source": "mine.py:lacks", "weight": 2}}}, "reward 'lacks' needs a column"),
        ({"reward_model": "task"}, "procedural tasks"),
        ({"reward_model": "mine.py:exact", "reward_config": {"timeot": 3}}, "task 'a': .*did you mean 'timeout'"),
        ({"reward_model": "mathh"}, "task 'a': no reward is called 'mathh'"),
        ({"reward_model": "mine.py:exact", "sampling": {"temprature": 1}}, "task 'a': .*mean 'temperature'"),
        (
            {"reward_model": "mine.py:exact", "constraint_model": "regex", "constraint_config": {"patern": "a"}},
            "task 'a': constraint 'regex' takes grammar",
        ),
        ({"reward_model": "mine.py:exact", "constraint_model": "mine.py:acept"}, "task 'a': .*did you mean 'accept'"),
    ],
)
def test_tasks_are_asked(run: Callable[..., Any], tmp_path: Path, task: Any, message: str) -> None:
    settings = run(tasks=[{"name": "a", "type": "grpo", "n": 2, **task}, {"name": "b", "type": "grpo",
                           "reward_model": "mine.py:length"}])  # fmt: skip
    del settings["algorithm"]
    settings["data"] |= {"train": {name: str(tmp_path / "train.jsonl") for name in ("a", "b")}, "eval": None}
    with pytest.raises((DataError, ConfigError), match=message):
        check_settings(build_config(settings))


def test_a_model_or_a_judge_is_not_read(run: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    parts = {"a": {"model": "no/such-model"}, "b": {"url": "http://127.0.0.1:9", "template": "{response} {anwser} {}"}}
    config = build_config(run(reward={"components": parts}, data={"eval": None}))
    check_settings(config)
    (text,) = (text for record in caplog.records if "template" in (text := record.getMessage()))
    assert "the template's {anwser} is no column of the data" in text and "did you mean 'answer'" in text


def test_a_trainer_asks_before_its_first_rollout(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(responses: list[str], anwser: list[str]) -> list[float]:
        return [0.0] * len(responses)

    actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 2})
    trainer = verl.Trainer(actor, reward_fn=lacks, algorithm="grpo", n=2, log_dir=False)
    monkeypatch.setattr(actor, "rollout", lambda *args: pytest.fail("it sampled"))
    with pytest.raises(DataError, match=r"the prompts: reward 'lacks' needs a column 'anwser'.*did you mean 'answer'"):
        trainer.step(ROWS)
    with pytest.raises(RewardError, match="needs a column 'anwser'"):  # by itself
        verl.Reward(lacks).get_reward(["a"])
