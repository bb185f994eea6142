"""The dealing of rows: every row once, caps kept, groups whole, no smaller largest part; and of some rows only."""

from __future__ import annotations

from itertools import combinations, pairwise

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.training.cases import ROWS, policy_loss, ragged_batch, token_weights
from tests.training.cases import part as loss_part
from verl.algorithms.loss_terms import Loss, LossInput
from verl.batch import Batch
from verl.training.micro_batch import Limits, MiniBatch, balanced, partition

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


def split(batch: Batch, limits: Limits, coupled: bool = False) -> list[list[int]]:
    """The micro-batches of one rank that computes all rows."""
    (dealt,), _ = partition(batch, range(len(batch)), 1, limits, coupled=coupled)
    return dealt


def _cost(rows: list[tuple[int, int]], part: list[int], share: bool = True) -> int:
    prompts = {rows[i][0] for i in part} if share else [rows[i][0] for i in part]
    return sum(3 * p + 1 for p in prompts) + sum(max(rows[i][1] - 1, 0) for i in part)


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS, st.booleans(), st.booleans())
def test_every_row_exactly_once(
    rows: list[tuple[int, int]], cap: int | None, max_rows: int | None, coupled: bool, share: bool
) -> None:
    parts = split(_batch(rows), Limits(cap, max_rows, share), coupled)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert all(parts)


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS, st.booleans())
def test_caps_are_kept_except_by_a_single_row(
    rows: list[tuple[int, int]], cap: int | None, max_rows: int | None, share: bool
) -> None:
    for part in split(_batch(rows), Limits(cap, max_rows, share)):
        assert max_rows is None or len(part) <= max_rows
        assert cap is None or len(part) == 1 or _cost(rows, part, share) <= cap


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS)
def test_coupled_groups_stay_whole(rows: list[tuple[int, int]], cap: int | None, max_rows: int | None) -> None:
    for part in split(_batch(rows), Limits(cap, max_rows), coupled=True):
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
    for part in split(_batch(rows, prompts_a_group=2), Limits(cap, max_rows), coupled):
        prompts = [rows[i][0] for i in part]
        changes = sum(a != b for a, b in pairwise(prompts))
        assert changes == len(set(prompts)) - 1


def test_a_shared_prompt_counts_once() -> None:
    rows = [(4, 5)] * 4  # 13 prompt tokens and 4 * 4 fed response tokens
    assert split(_batch(rows), Limits(29)) == [[0, 1, 2, 3]]
    assert [len(part) for part in split(_batch(rows), Limits(28))] == [2, 2]
    assert [len(part) for part in split(_batch(rows), Limits(29, share_prompts=False))] == [1, 1, 1, 1]


def test_without_caps_there_is_one_part_and_without_rows_none() -> None:
    parts = split(_batch([(1, 3), (2, 5), (1, 2)]), Limits())
    assert len(parts) == 1
    assert sorted(parts[0]) == [0, 1, 2]
    assert split(_batch([]), Limits()) == []


@_RELAXED
@given(st.lists(st.integers(1, 12), min_size=2, max_size=8), st.integers(12, 40))
def test_no_cut_of_the_sorted_units_has_a_smaller_largest_part(lengths: list[int], cap: int) -> None:
    count = len(lengths)
    batch = Batch.from_columns(
        {"prompt_tokens": [[i] for i in range(count)], "response_tokens": [[0] * n for n in lengths]}
    )
    parts = split(batch, Limits(cap))
    costs = sorted(lengths, reverse=True)
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, count), strict=True))
        for cuts in combinations(range(1, count), len(parts) - 1)
    )
    assert max(sum(lengths[i] for i in part) for part in parts) == best


@_RELAXED
@given(_ROWS, _CAP, _MAX_ROWS, st.integers(1, 4), st.booleans(), st.booleans())
def test_ranks_together_compute_every_row_once(
    rows: list[tuple[int, int]], cap: int | None, max_rows: int | None, ranks: int, coupled: bool, lockstep: bool
) -> None:
    batch, limits = _batch(rows), Limits(cap, max_rows)
    dealt, _ = partition(batch, range(len(rows)), ranks, limits, coupled=coupled, lockstep=lockstep)
    by_rank = balanced(batch, ranks, coupled) if ranks > 1 else [list(range(len(rows)))]
    assert [sorted(row for part in parts for row in part) for parts in dealt] == by_rank
    for parts, here in zip(dealt, by_rank, strict=True):  # as it would cut a batch of its rows alone
        assert [[here.index(row) for row in part] for part in parts if part] == split(batch.take(here), limits, coupled)
    if lockstep:
        assert len({len(parts) for parts in dealt}) == 1


@_RELAXED
@given(_ROWS, _CAP, st.integers(1, 4), st.sets(st.integers(0, 23)), st.booleans())
def test_of_a_selection_all_rows_and_no_others_are_dealt(
    rows: list[tuple[int, int]], cap: int | None, ranks: int, chosen: set[int], lockstep: bool
) -> None:
    """A rank that is left without rows runs as many empty micro-batches as the busiest one has."""
    batch, limits, computed = _batch(rows), Limits(cap), sorted(row for row in chosen if row < len(rows))
    dealt, tree = partition(batch, computed, ranks, limits, lockstep=lockstep)
    assert sorted(row for parts in dealt for part in parts for row in part) == computed
    alone, same = partition(batch.take(computed), range(len(computed)), ranks, limits, lockstep=lockstep)
    assert tree.take(computed) == same
    assert dealt == [[[computed[row] for row in part] for part in parts] for parts in alone]
    full = [sum(map(bool, parts)) for parts in dealt]
    assert [len(parts) for parts in dealt] == ([max(full)] * ranks if lockstep else full)


def test_totals_are_of_all_rows_whichever_are_computed() -> None:
    batch = ragged_batch(ROWS)
    seen: list[LossInput] = []

    def loss(x: LossInput) -> Loss:
        seen.append(x)
        return policy_loss(x)

    (dealt,), _ = partition(batch, [1, 4], 1, Limits(max_rows=1))
    assert dealt == [[1], [4]]
    mini_batch = MiniBatch(loss_part(batch, loss), torch.float64)
    for rows in dealt:
        taken = batch.take(rows)
        mini_batch.loss(rows, taken, {"log_probs": torch.zeros(sum(taken.lengths("response_tokens"))).double()})
    lengths = batch.lengths("response_tokens")
    assert {x.total_sequences for x in seen} == {len(ROWS)}
    assert {x.total_groups for x in seen} == {len(batch.group_indices())}
    masked = int(batch.tensor("response_mask").count_nonzero()) if "response_mask" in batch else sum(lengths)
    assert {x.total_tokens for x in seen} == {masked}
    assert [len(x.weights) for x in seen] == [lengths[1], lengths[4]]
    whole = token_weights(batch).double().split(lengths)
    assert all(torch.equal(x.weights, whole[row]) for x, row in zip(seen, (1, 4), strict=True))
