"""Prompts that teach nothing are drawn as often as is stated, and a run goes on with what it knew of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from verl._base.record import SettingsError
from verl.data.loader import PromptLoader, note_scores
from verl.data.pools import PoolOptions, Pools
from verl.data.prompts import load_prompts, stream_prompts
from verl.data.task_loader import MixedLoader, TaskLoader
from verl.errors import ConfigError, DamagedCheckpointError, DataError

SOLVED, FAILED, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]
KINDS = st.sampled_from([SOLVED, FAILED, MIXED, [0.5, 0.5], [None, None], [None, 1.0]])


def loader(size: int, batch: int = 1, *, seed: int = 0, pools: Any = None, **options: Any) -> PromptLoader:
    return PromptLoader(load_prompts([f"p{i}" for i in range(size)]), batch, seed=seed, pools=pools, **options)


def epochs(prompts: PromptLoader, first: int, count: int) -> list[list[int]]:
    """The rows that each of so many epochs draws; the loader goes on somewhere behind them."""
    drawn: list[list[int]] = [[] for _ in range(count + 1)]
    while not drawn[count]:
        for name in prompts.take(100)["id"]:
            epoch, row = map(int, name[1:].split("."))
            drawn[min(epoch - first, count)].append(row)
    return drawn[:count]


@given(
    chances=st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)),
    decay=st.floats(0, 0.95),
    seed=st.integers(0, 2**32 - 1),
)
@examples(10)
def test_prompts_are_drawn_as_often_as_stated(chances: tuple[float, float], decay: float, seed: int) -> None:
    """1,500 prompts of each kind: of those that no epoch has drawn yet, the next draws the stated share, within five
    deviations."""
    rows = 4500
    prompts = loader(rows, seed=seed, pools={"solved": chances[0], "failed": chances[1], "decay": decay})
    prompts.take(rows)
    prompts.note({f"e0.{row}": (SOLVED, FAILED, MIXED)[row % 3] for row in range(rows)})
    waiting = set(range(rows))
    for passed, drawn in enumerate(epochs(prompts, 1, 4)):
        for kind in range(3):
            of_kind = [row for row in waiting if row % 3 == kind]
            stated = 1 - (1 - (*chances, 1.0)[kind]) * decay**passed
            deviation = (len(of_kind) * stated * (1 - stated)) ** 0.5
            assert abs(len({*of_kind} & {*drawn}) - len(of_kind) * stated) <= 5 * deviation + 1e-6
        waiting -= {*drawn}  # what becomes of them after that is not told here


@given(size=st.integers(1, 20), batch=st.integers(1, 9), seed=st.integers(0, 99), kinds=st.lists(KINDS, min_size=20))
@examples(40)
def test_a_run_goes_on_with_what_it_knew_and_the_size_of_a_batch_changes_no_draw(
    size: int, batch: int, seed: int, kinds: list[list[float | None]]
) -> None:
    def steps(prompts: PromptLoader, count: int) -> list[list[str]]:
        drawn = []
        for _ in range(count):
            drawn.append(next(prompts)["id"])
            prompts.note({name: kinds[int(name.split(".")[1]) % len(kinds)] for name in drawn[-1]})
        return drawn

    straight, first, second = (loader(size, batch, seed=seed, pools={}) for _ in range(3))
    expected = steps(straight, 12)
    begun = steps(first, 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + steps(second, 7) == expected
    assert second.state_dict() == straight.state_dict()
    sizes = note_scores(loader(size, pools={}), {f"e0.{row}": kinds[row] for row in range(size)})
    counts = Counter(map(str, kinds[:size]))
    assert sizes["pools/solved"] == counts["[1.0, 1.0]"] + counts["[None, 1.0]"]
    assert (sizes["pools/failed"], sum(sizes.values())) == (counts["[0.0, 0.0]"], size)
    # Nothing is told: what is drawn does not depend on how many are drawn at once.
    one, other = loader(size, 3, seed=seed, pools={}), loader(size, 3, seed=seed, pools={})
    for prompts in (one, other):
        prompts.note({f"e0.{row}": kinds[row] for row in range(size)})
    ids = [name for _ in range(batch) for name in one.take(3)["id"]]
    assert ids == other.take(3 * batch)["id"]


@given(size=st.integers(1, 30), batch=st.integers(1, 9), seed=st.integers(0, 99), shuffle=st.booleans())
@examples(20)
def test_pools_in_which_nothing_is_leave_all_as_it_is_without_them(
    size: int, batch: int, seed: int, shuffle: bool
) -> None:
    plain = loader(size, batch, seed=seed, shuffle=shuffle)
    pooled = loader(size, batch, seed=seed, shuffle=shuffle, pools={})
    for _ in range(9):
        assert next(pooled) == next(plain)
    assert "pools" not in plain.state_dict() and "pooled" not in plain.state_dict()
    assert plain.state_dict().items() <= pooled.state_dict().items()


def test_a_prompt_leaves_its_pool_by_its_next_samples_and_late_ones_change_nothing() -> None:
    pools = Pools(PoolOptions(solved=0.2, decay=0.5, solved_at=0.8, failed_at=-1.0), 3)
    pools.note(4, 0, [0.8, 2.0])
    assert [round(pools.chance(epoch, 0), 6) for epoch in (5, 6, 7, 99)] == [0.2, 0.6, 0.8, 1.0]
    pools.note(3, 0, [0.0])  # drawn before, and trained after: by asynchronous workers
    assert pools.sizes() == {"pools/solved": 1, "pools/failed": 0, "pools/none": 2}
    pools.note(6, 0, [0.8, 0.0])
    assert pools.chance(7, 0) == 1 and pools.sizes()["pools/none"] == 3
    for scores, name in (([-1.0, -3.0], "failed"), ([0.0, 0.0], "none"), ([None, float("nan")], "none")):
        pools.note(7, 1, scores)
        assert pools.sizes()[f"pools/{name}"] == (1 if name == "failed" else 3)


def test_several_tasks_and_data_sets_have_pools_of_their_own_and_keep_their_shares() -> None:
    def sources() -> dict[str, PromptLoader]:
        return {name: loader(40, pools={"solved": 0.05, "decay": 0.9}) for name in ("a", "a.b")}

    tasks = TaskLoader(sources(), {"a": 1, "a.b": 3}, batch_size=8)
    sizes: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for _ in range(60):
        batch = next(tasks)
        counts.update({name: len(rows) for name, rows in batch.items()})
        sizes = note_scores(tasks, dict.fromkeys(batch["a.b"]["group"], SOLVED) if "a.b" in batch else {})
    assert counts == {"a": 120, "a.b": 360}
    assert (sizes["task/a/pools/solved"], sizes["task/a.b/pools/solved"]) == (0, 40)
    mixed = MixedLoader(sources(), {"a": 1, "a.b": 1}, batch_size=8)
    first = next(mixed)["group"]
    assert note_scores(mixed, dict.fromkeys(first, FAILED)) == {"pools/solved": 0, "pools/failed": 8, "pools/none": 72}
    state = json.loads(json.dumps(mixed.state_dict()))
    again = MixedLoader(sources(), {"a": 1, "a.b": 1}, batch_size=8)
    again.load_state_dict(state)
    assert again.state_dict() == state and next(again) == next(mixed)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"iterator is a stream, whose prompts are not drawn again.*pools out"):
        PromptLoader(stream_prompts(iter("ab")), 1, pools={})
    with pytest.raises(SettingsError, match=r"pools.solved: must be at least 0.01"):
        loader(3, pools={"solved": 0.0})
    with pytest.raises(SettingsError, match=r"decay: must be less than 1"):
        loader(3, pools={"decay": 1.0})
    with pytest.raises(SettingsError, match=r"failed_at: must be below solved_at \(0.5\), not 0.5"):
        loader(3, pools={"failed_at": 0.5, "solved_at": 0.5})
    with pytest.raises(SettingsError, match=r"failed_at: must be below solved_at \(0.5\), not 0.6"):
        loader(3, pools={"failed_at": {"a": 0.6}, "solved_at": {"a": 0.5}})
    by_task = PoolOptions(solved_at={"a": 0.5, "b": 7.0})
    assert [by_task.bounds(name) for name in "abc"] == [(0.5, 0.0), (7.0, 0.0), (1.0, 0.0)]
    plain, pooled = loader(3).state_dict(), loader(3, pools={}).state_dict()
    with pytest.raises(DataError, match=r"was drawn with pools .*'solved': 0.25"):
        loader(3).load_state_dict(pooled)
    with pytest.raises(DataError, match="pools was None, is"):
        loader(3, pools={}).load_state_dict(plain)
    other_row, no_epoch = ({"solved": {epoch: [row]}, "failed": {}} for epoch, row in (("0", 3), ("x", 0)))
    wrong: Any
    for wrong in (None, {"solved": {}}, other_row, no_epoch):
        with pytest.raises(DamagedCheckpointError, match="the pools of the saved position"):
            loader(3, pools={}).load_state_dict({**pooled, "pooled": wrong})
