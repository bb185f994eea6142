"""Micro-batches: every row once, caps kept, groups whole, no smaller largest part."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from verl.batch import Batch
from verl.training.micro_batch import split

_ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 30)),  # which prompt, response length
    max_size=24,
)
# Time limits say more about the machine's other work than about this code.
_RELAXED = settings(suppress_health_check=[HealthCheck.too_slow])
_CAP = st.none() | st.integers(1, 80)
_MAX_ROWS = st.none() | st.integers(1, 9)


def _batch(rows: list[tuple[int, int]], prompts_a_group: int = 1) -> Batch:
    """Prompt number p has 3 * p + 1 tokens; rows of one prompt, or of several, are one group."""
    return Batch.from_columns(
        {
            "prompt_tokens": [[p] * (3 * p + 1) for p, _ in rows],
            "response_tokens": [[7] * length for _, length in rows],
            "group": [str(p // prompts_a_group) for p, _ in rows],
        }
    )


def _cost(rows: list[tuple[int, int]], part: list[int], share: bool = True) -> int:
    prompts = {rows[i][0] for i in part} if share else [rows[i][0] for i in part]
    return sum(3 * p + 1 for p in prompts) + sum(max(rows[i][1] - 1, 0) for i in part)


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS, st.booleans(), st.booleans())
def test_every_row_exactly_once(
    rows: list[tuple[int, int]], cap: int | None, max_rows: int | None, coupled: bool, share: bool
) -> None:
    parts = split(_batch(rows), cap, max_rows, coupled, share)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert all(parts)


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS, st.booleans())
def test_caps_are_kept_except_by_a_single_row(
    rows: list[tuple[int, int]], cap: int | None, max_rows: int | None, share: bool
) -> None:
    for part in split(_batch(rows), cap, max_rows, share_prompts=share):
        assert max_rows is None or len(part) <= max_rows
        assert cap is None or len(part) == 1 or _cost(rows, part, share) <= cap


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS)
def test_coupled_groups_stay_whole(rows: list[tuple[int, int]], cap: int | None, max_rows: int | None) -> None:
    for part in split(_batch(rows), cap, max_rows, coupled=True):
        groups = {rows[i][0] for i in part}
        assert sorted(part) == [i for i, (p, _) in enumerate(rows) if p in groups]
        if len(groups) > 1:
            assert max_rows is None or len(part) <= max_rows
            assert cap is None or _cost(rows, part) <= cap


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS, st.booleans())
@example([(0, 7), (2, 0), (2, 2), (2, 16)], 22, None, False)
def test_equal_prompts_stand_side_by_side(
    rows: list[tuple[int, int]], cap: int | None, max_rows: int | None, coupled: bool
) -> None:
    for part in split(_batch(rows, prompts_a_group=2), cap, max_rows, coupled):
        prompts = [rows[i][0] for i in part]
        changes = sum(a != b for a, b in pairwise(prompts))
        assert changes == len(set(prompts)) - 1


def test_a_shared_prompt_counts_once() -> None:
    rows = [(4, 5)] * 4  # 13 prompt tokens and 4 * 4 fed response tokens
    assert split(_batch(rows), max_tokens=29) == [[0, 1, 2, 3]]
    assert [len(part) for part in split(_batch(rows), max_tokens=28)] == [2, 2]
    assert [len(part) for part in split(_batch(rows), max_tokens=29, share_prompts=False)] == [1, 1, 1, 1]


def test_without_caps_there_is_one_part_and_without_rows_none() -> None:
    parts = split(_batch([(1, 3), (2, 5), (1, 2)]))
    assert len(parts) == 1
    assert sorted(parts[0]) == [0, 1, 2]
    assert split(_batch([])) == []


@_RELAXED
@given(st.lists(st.integers(1, 12), min_size=2, max_size=8), st.integers(12, 40))
def test_no_cut_of_the_sorted_units_has_a_smaller_largest_part(lengths: list[int], cap: int) -> None:
    count = len(lengths)
    batch = Batch.from_columns(
        {"prompt_tokens": [[i] for i in range(count)], "response_tokens": [[0] * n for n in lengths]}
    )
    parts = split(batch, max_tokens=cap)
    costs = sorted(lengths, reverse=True)
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, count), strict=True))
        for cuts in combinations(range(1, count), len(parts) - 1)
    )
    assert max(sum(lengths[i] for i in part) for part in parts) == best
