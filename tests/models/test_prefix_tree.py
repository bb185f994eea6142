"""Rows as trees: each beginning once, the numbers those of rows one by one."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.conftest import make_model
from tests.models.test_packed import difference, gradients, log_probs
from tests.properties import examples
from tests.varlen import varlen_attn
from verl.attention import flash, segments
from verl.attention import prefix_tree as trees
from verl.attention.prefix_tree import PrefixTree, families, prefix_tree
from verl.attention.segments import Packed, Row, pack_rows
from verl.attention.varlen import VarlenKeys
from verl.models.packed import PackedModel

Rows = list[tuple[list[int], list[int]]]  # prompt, response


@st.composite
def forked(draw: st.DrawFn) -> Rows:
    """Rows, most of which begin with a part of an earlier one."""
    token = st.integers(0, 2)
    rows: Rows = []
    for _ in range(draw(st.integers(1, 7))):
        earlier: list[int] = []
        if rows and draw(st.booleans()):
            earlier = [*chain(*draw(st.sampled_from(rows)))]
        row = earlier[: draw(st.integers(0, len(earlier)))] + draw(st.lists(token, min_size=1, max_size=9))
        prompt = draw(st.integers(1, len(row)))
        rows.append((row[:prompt], row[prompt:]))
    return rows


def tree_of(rows: Rows, groups: list[str] | None = None) -> PrefixTree:
    prompts = [np.array(prompt) for prompt, _ in rows]
    fed = [np.array(prompt + response[:-1]) for prompt, response in rows]
    return prefix_tree(fed, [*map(len, prompts)], families(prompts, groups or ["g"] * len(rows)))


def packed(rows: Rows, share: bool = True, keep_last: bool = False) -> Packed:
    tree = tree_of(rows)
    order = [*chain(*tree.trees(range(len(rows))))]
    prompts, responses = zip(*(rows[row] for row in order), strict=True)
    return pack_rows(
        prompts, responses, share_prompts=share, keep_last=keep_last, tree=tree.take(order) if share else None
    )


@examples(100)
@given(forked(), st.booleans())
def test_each_beginning_is_there_once(rows: Rows, keep_last: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trees, "LEAST", 1)
        flat = packed(rows, keep_last=keep_last)
        deep = [*chain(*tree_of(rows).trees(range(len(rows))))]
    fed = [(prompt + response[:-1], response[-1:] * keep_last) for prompt, response in (rows[row] for row in deep)]
    once = len({tuple(row[:end]) for row, _ in fed for end in range(1, len(row) + 1)})
    assert len(flat.tokens) == once + sum(len(last) for _, last in fed)
    for place, (row, last) in zip(flat.context.indices, fed, strict=True):
        assert flat.tokens[place].tolist() == row + last
        assert flat.positions[place].tolist() == list(range(len(place)))
    ends = np.cumsum([row.length for row in flat.context.rows])
    assert [row.start for row in flat.context.rows] == [0, *ends[:-1]]


@examples(100)
@given(forked(), st.integers(1, 6), st.permutations(range(7)))
def test_rows_cost_what_they_have_when_packed(rows: Rows, least: int, order: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trees, "LEAST", least)
        tree = tree_of(rows)
    assert [sum(tree.lengths[node] for node in path) for path in tree.paths] == [len(p + r[:-1]) for p, r in rows]
    assert sum(tree.lengths) == tree.tokens(range(len(rows)))
    some = [row for row in order if row < len(rows)][: max(1, len(rows) // 2)]
    deep = [*chain(*tree.trees(some))]
    assert sorted(deep) == sorted(some)
    prompts, responses = zip(*(rows[row] for row in deep), strict=True)
    assert len(pack_rows(prompts, responses, tree=tree.take(deep)).tokens) == tree.tokens(some)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "phi3", "mistral"])
@pytest.mark.parametrize("way", ["steps", "sdpa", "varlen"])
def test_log_probs_and_gradients_are_those_of_flat_rows(monkeypatch: pytest.MonkeyPatch, kind: str, way: str) -> None:
    """Over windows of 3 and 4 tokens, too, which reach over several forks."""
    monkeypatch.setattr(trees, "LEAST", 1)
    if way == "sdpa":
        monkeypatch.setattr(segments, "attend", segments.sdpa_attend)
    if way == "varlen":
        monkeypatch.setattr(flash, "flash_attention", lambda value: varlen_attn)
    model = PackedModel(make_model(kind))

    @examples(20)
    @given(forked())
    def check(rows: Rows) -> None:
        values, expected = (log_probs(model, packed(rows, share)) for share in (True, False))
        assert expected.shape == values.shape
        if len(expected):
            assert (values - expected).abs().max() < 1e-10
            assert difference(gradients(model.model, values), gradients(model.model, expected)) < 1e-10

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_compute_trees(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(trees, "LEAST", 2)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
    model = PackedModel(make_model("llama", dtype, **sizes))
    trunk = list(range(20))
    rows = [(trunk[:3], trunk[3:]), (trunk[:3], [*trunk[3:9], 30, 31]), (trunk[:12], [40, 41]), (trunk[:12], [50] * 4)]
    shared, flat = packed(rows), packed(rows, False)
    assert len(shared.context.rows) == 6 and len(shared.tokens) < 0.5 * len(flat.tokens)
    values, expected = log_probs(model, shared), log_probs(model, flat)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert (values - expected).abs().max() < tolerance * expected.abs().max()
    assert difference(gradients(model.model, values), gradients(model.model, expected)) < tolerance


def test_samples_of_a_prompt_are_rows_behind_it() -> None:
    """As long as no two of them are alike for `LEAST` tokens."""
    rows = [([5, 6, 7], [1, 2, 3]), ([5, 6, 7], [1, 2, 4]), ([5, 6, 7], []), ([8], [1, 2]), ([9], []), ([9], [])]
    flat = packed(rows)
    prompt = Row(0, 3)
    assert list(flat.context.rows) == [prompt, Row(3, 2, prompt), Row(5, 2, prompt), Row(7, 2), Row(9, 1)]


def test_what_is_shared_has_a_least_length() -> None:
    least = trees.LEAST
    prompt, response = [1, 2], [3] * (least - 1)

    def count(*rows: tuple[list[int], list[int]], groups: Any = ("a", "b")) -> int:
        return sum(tree_of([*rows], [*groups]).lengths)

    # Past an equal prompt.
    assert count((prompt, [*response, 4, 0]), (prompt, [*response, 5, 0])) == 2 + 2 * least
    assert count((prompt, [*response, 3, 4, 0]), (prompt, [*response, 3, 5, 0])) == 2 + least + 2
    # Of different prompts, in one group.
    rows = ([7] * (least - 1) + [8], [0]), ([7] * (least - 1) + [9], [0])
    assert count(*rows, groups=["a", "a"]) == 2 * least
    rows = ([7] * least + [8], [0]), ([7] * least + [9], [0])
    assert count(*rows, groups=["a", "a"]) == least + 2
    assert count(*rows) == count(*rows, groups=[None, None]) == 2 * (least + 1)


@pytest.mark.parametrize("keep_last", [False, True])
def test_prompts_of_one_micro_batch_share_what_they_begin_with(keep_last: bool) -> None:
    """A system prompt, and behind it examples that two of three groups have."""
    system, examples = ([first + n % 7 for n in range(trees.LEAST_BETWEEN)] for first in (5, 6))
    rows = [
        ([*system, *beginning, question], [answer, 3])
        for beginning, question in (([], 20), (examples, 21), (examples, 22))
        for answer in (8, 9)
    ]
    rows.append(([4, *system], [8, 3]))  # not the beginning
    prompts, responses = zip(*rows, strict=True)
    shared, flat = (pack_rows(prompts, responses, share_prompts=share, keep_last=keep_last) for share in (True, False))
    assert len(shared.tokens) == 2 * trees.LEAST_BETWEEN + 3 + 6 + 1 + trees.LEAST_BETWEEN + 1 + 7 * keep_last
    for packed in (shared, flat):
        for place, (prompt, response) in zip(packed.context.indices, rows, strict=True):
            assert packed.tokens[place].tolist() == prompt + response[: 1 + keep_last]
    model = PackedModel(make_model("llama"))
    values, expected = log_probs(model, shared), log_probs(model, flat)
    assert (values - expected).abs().max() < 1e-10
    assert difference(gradients(model.model, values), gradients(model.model, expected)) < 1e-10


def test_prompts_share_no_less_than_the_least() -> None:
    for count, shared in ((trees.LEAST_BETWEEN, trees.LEAST_BETWEEN), (trees.LEAST_BETWEEN - 1, 0)):
        prompts = [[*[7] * count, question] for question in (8, 9)]
        assert len(pack_rows(prompts, [[1], [1]]).tokens) == 2 * (count + 1) - shared


def test_a_thousand_forks_one_in_another() -> None:
    trunk = np.arange(1000)
    rows = [trunk[: end + 1] for end in range(1000)]
    tree = prefix_tree([np.append(row, 5000 + n) for n, row in enumerate(rows)], [1] * 1000, [0] * 1000)
    # A node of the prompt, then one each `LEAST` tokens.
    assert max(map(len, tree.paths)) <= 2 + 1000 // trees.LEAST
    assert sum(tree.lengths) < 0.1 * sum(map(len, rows))


def test_on_a_device_a_chat_template_costs_no_launches() -> None:
    """There the gradients of a shared token's copies are added in as many rounds as it has copies: with a template in
    common these would be all rows of the micro-batch, not the samples of one prompt."""

    def rounds(template: int, device: str) -> int:
        prompts = [[5] * template + [9 + n, 7, 8] for n in range(8) for _ in range(4)]
        responses = [[100 + n, 3] for n in range(32)]
        return len(VarlenKeys(pack_rows(prompts, responses, device).context.rows).rounds)

    assert rounds(24, "meta") == rounds(0, "meta") == 4
    assert rounds(24, "cpu") == 40  # buckets there, which make no copies
    least = trees.LEAST_BETWEEN_ON_DEVICE
    assert (rounds(least - 1, "meta"), rounds(least, "meta")) == (4, 40)
