"""Workers of one's own: the same answers and errors in one process and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from verl.cluster.rank_context import dispatch
from verl.errors import ConfigError

SCRIPT = Path(__file__).with_name("own_worker.py")


def test_answers_and_errors_are_those_of_one_process(tmp_path: Path) -> None:
    ranks.alone(SCRIPT, tmp_path / "alone")
    ranks.job(2, SCRIPT, tmp_path / "two")
    alone, two = (json.loads((tmp_path / name).read_text()) for name in ("alone", "two"))
    assert two["double"] == [0, 2, 4, 6, 8] and two["each"] == [0, 1, 2, 3, 4]
    assert two["double empty"] == "y: double\nz: null" and two["each empty"] == []
    differing = {"short", "nothing"}  # in how many rows a rank got
    assert {**alone, **dict.fromkeys(differing)} == {**two, **dict.fromkeys(differing)}
    for found, rows in ((alone, 5), (two, 3)):
        assert found["short"].startswith(
            f"DataError: 'actor.short' collects rows, and rank 0 answered {rows} rows with 1"
        )
        assert "'actor.nothing' collects rows" in found["nothing"] and "with NoneType" in found["nothing"]
    assert "its first argument, not by keyword, is a Batch; got none" in two["by keyword"]
    assert two["no batch"].endswith("got list")
    assert two["overridden"] == two["by name"] == "mine"
    assert two["of another class"] == (
        "ConfigError: Mine has no method 'named' that a controller may call: did you mean 'name'?"
    )
    assert "of mesh 'infer', and this role has no such mesh: known: role, rollout, train" in two["elsewhere"]


@pytest.mark.parametrize(("options", "message"), [
    ({"collect": "rows"}, "call '.*method': of split='whole', collect='rows' cannot be made"),
    ({"collect": "batches"}, "cannot be made: give 'first', 'shards', 'none'"),
    ({"split": "rows"}, "of split='rows', collect='first' cannot be made: give 'rows', 'batches', 'none'"),
    ({"split": "row"}, "no split 'row': did you mean 'rows'"),
])  # fmt: skip
def test_what_cannot_be_collected_is_refused_when_it_is_declared(options: dict[str, Any], message: str) -> None:
    def method(self: Any) -> None: ...

    with pytest.raises(ConfigError, match=message):
        dispatch("train", **options)(method)


def test_an_async_verb_is_refused() -> None:
    async def method(self: Any) -> None: ...

    with pytest.raises(ConfigError, match="is async"):
        dispatch("train")(method)
