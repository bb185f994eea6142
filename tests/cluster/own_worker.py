"""A worker of one's own, and what its calls answer or raise; started by the tests in one process and in several.

python own_worker.py OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import verl
from verl.batch import Batch
from verl.cluster.rank_context import ALONE, RankContext, dispatch


class Theirs:
    @dispatch()
    def name(self) -> str:
        return "theirs"


class Mine(Theirs):
    def __init__(self, *, context: RankContext = ALONE) -> None:
        self.context = context

    @dispatch(split="rows", collect="rows")
    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns({"y": (2 * batch.tensor("x")).double(), "z": ["a"] * len(batch)})

    @dispatch("train", split="rows", collect="batches")
    def each(self, batch: Batch) -> Iterator[Batch]:
        for row in range(len(batch)):
            yield batch.slice(row, 1)

    @dispatch("train", split="rows", collect="rows")
    def short(self, batch: Batch) -> Batch:
        return batch.slice(0, 1)

    @dispatch("train", split="rows", collect="rows")
    def nothing(self, batch: Batch) -> None: ...

    @dispatch()
    def name(self) -> str:
        return "mine"

    @dispatch("infer")
    def elsewhere(self) -> int:
        return 1


class Other:
    @dispatch()
    def named(self) -> str:
        return "other"


def answers() -> dict[str, Any]:
    group: Any = verl.Controller().group("actor", partial(Mine))
    batch = Batch.from_rows([{"x": x, "prompt_tokens": [x], "response_tokens": [3]} for x in range(5)])
    calls: dict[str, Callable[[], Any]] = {
        "double": lambda: group.call(Mine.double, batch)["y"],
        "double empty": lambda: str(group.call(Mine.double, batch.take([])).table.schema),
        "each": lambda: sorted(x for part in group.call(Mine.each, batch) for x in part["x"]),
        "each empty": lambda: list(group.call(Mine.each, batch.take([]))),
        "short": lambda: group.call(Mine.short, batch),
        "nothing": lambda: group.call(Mine.nothing, batch),
        "by keyword": lambda: group.call(Mine.double, batch=batch),
        "no batch": lambda: group.call(Mine.double, [{"x": 1}]),
        "elsewhere": lambda: group.call(Mine.elsewhere),
        "overridden": lambda: group.call(Theirs.name),
        "by name": lambda: group.call("name"),
        "of another class": lambda: group.call(Other.named),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    found = answers()
    Path(sys.argv[1]).write_text(json.dumps(found))
