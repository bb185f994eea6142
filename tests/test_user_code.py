"""Errors of the user's own code: every place that calls it says the line, and shows the traceback once."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.dataflow.test_groups import run_graph
from verl._host.user_code import describe
from verl._host.user_functions import load_function
from verl.batch import Batch
from verl.dataflow.graph import Graph, Node
from verl.errors import RewardError, TrainingError
from verl.report.sinks import Logger
from verl.rollout.tools import Tool

CODE = """
import json


def score(texts):
    return [inner(text) for text in texts]


async def score_async(texts):
    return score(texts)


def inner(text):
    return json.loads(text)


def hook(step, record):
    return record["no such metric"]


def node(batch):
    return inner("{")


async def episode(client, row):
    return row["no such column"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def shown(caplog: pytest.LogCaptureFixture, line: str) -> list[str]:
    """Messages with a whole traceback, which ends in a library here, and has this line of the user's."""
    records = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    return [text for text in records if "Traceback (most recent call last)" in text and line in text]


@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize("name", ["score", "score_async"])
def test_a_reward_says_the_line_and_shows_the_traceback_once(
    file: Path, name: str, process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reward = verl.Reward(f"{file}:{name}", process=process)
    for _ in range(2):
        scores = reward.get_reward(["{", "{"])
        assert scores["reward"] == [None, None]
        assert f"{file} line 14, in inner" in scores["abstain_reason"][0]  # not the line within json
    (text,) = shown(caplog, "return json.loads(text)")
    assert f"reward {name}" in text and "JSONDecodeError" in text and "decoder.py" in text
    assert sum(f"{file} line 14, in inner" in record.getMessage() for record in caplog.records) == 2


def test_too_many_failures_name_the_line(file: Path) -> None:
    with pytest.raises(RewardError, match=r"64 of the latest 64 samples.*mine\.py line 14, in inner"):
        verl.Reward(f"{file}:score").get_reward(["{"] * 64)


def _hook(file: Path) -> str:
    logger = Logger()
    logger.on_log_hook(load_function(f"{file}:hook"))
    logger.log(1, {"reward": 1.0})
    return ""


def _tool(file: Path) -> str:
    tool = Tool("inner", {}, load_function(f"{file}:inner"))
    return asyncio.run(tool.call({"text": "{"}))


def _node(file: Path) -> str:
    graph = Graph([Node(name="mine", run=load_function(f"{file}:node"), inputs=("x",), outputs=("y",))], ["x"])
    with pytest.raises(TrainingError) as error:
        run_graph(graph, Batch.from_columns({"x": [1]}))
    return str(error.value)


def _import(file: Path) -> str:
    broken = file.with_name("broken.py")
    broken.write_text("import json\n\n\nX = json.loads('{')\n")
    with pytest.raises(RewardError) as error:
        load_function(f"{broken}:f")
    return str(error.value)


@pytest.mark.parametrize(
    ("call", "line"),
    [(_hook, 'record["no such metric"]'), (_tool, "return json.loads(text)")],
)
def test_what_is_called_beside_the_run_shows_its_traceback(
    file: Path, call: Callable[[Path], str], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    call(file)
    call(file)
    assert len(shown(caplog, line)) == 1


@pytest.mark.parametrize(("call", "place"), [(_node, "mine.py line 14, in inner"), (_import, "broken.py line 4")])
def test_what_ends_the_run_names_the_line(file: Path, call: Callable[[Path], str], place: str) -> None:
    assert place in call(file)


def test_an_episode_says_the_line(file: Path, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 2}, episode=f"{file}:episode")
    samples = actor.generate_sequences(["A", "B"])
    assert all(f"{file} line 26, in episode" in error for error in samples["episode_error"])
    assert len(shown(caplog, 'row["no such column"]')) == 1


def test_an_error_without_a_place_or_a_text_is_described() -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise ValueError

    errors: dict[str, Any] = {"BadError": BadError(), "KeyError: 'x'": KeyError("x")}
    assert {text: describe(error) for text, error in errors.items()} == {text: text for text in errors}
    assert len(describe(ValueError("x" * 10**6))) < 300
