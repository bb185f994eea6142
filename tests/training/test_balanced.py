"""Rows dealt out to ranks by their tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl.batch import Batch
from verl.training.micro_batch import balanced


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=24),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_row_once_and_coupled_groups_whole(rows: list[tuple[int, int]], parts: int, coupled: bool) -> None:
    batch = Batch.from_columns(
        {
            "group": [f"g{group}" for group, _ in rows],
            "prompt_tokens": [[group] * (group + 1) for group, _ in rows],
            "response_tokens": [[1] * length for _, length in rows],
        }
    )
    chosen = balanced(batch, parts, coupled)
    assert sorted(row for part in chosen for row in part) == list(range(len(rows)))
    assert len(chosen) == parts
    if coupled:
        homes = [{index for index, part in enumerate(chosen) for row in part if rows[row][0] == g} for g in range(4)]
        assert all(len(home) <= 1 for home in homes)
    elif len(rows) >= 1:
        cost = [length - 1 + rows[i][0] + 1 for i, (_, length) in enumerate(rows)]
        loads = [sum(cost[row] for row in part) for part in chosen]
        # A rank that is given more has less than a fair share; a run of rows is a share and a prompt, or a single row.
        fair = -(-sum(cost) // parts)
        assert max(loads) <= fair + max(fair + 4, max(cost))


def test_one_prompt_with_many_samples_is_cut_between_ranks() -> None:
    batch = Batch.from_columns(
        {"group": ["g"] * 8, "prompt_tokens": [[1, 2, 3]] * 8, "response_tokens": [[1] * 10] * 8}
    )
    assert [len(part) for part in balanced(batch, 2)] == [4, 4]
