from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from verl.errors import ConfigError, RolloutError
from verl.kernels.compiled import kernels
from verl.rollout.base import Request, SamplingParams
from verl.rollout.embedded import sampler
from verl.rollout.embedded.sampler import BLOCK

both = pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])


def grid(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    params: Sequence[SamplingParams],
    compiled: bool,
    edits: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = kernels(logits.dtype, logits.device) if compiled else None
    assert (kernel is not None) == compiled
    flags, table = sampler.sampling_table(params, uniforms.numpy())
    return sampler.sample(logits, flags, torch.from_numpy(table), kernel, edits or {})


def draw(row: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor, compiled: bool) -> tuple[torch.Tensor, ...]:
    return sample(row.repeat(len(uniforms), 1), uniforms, [params] * len(uniforms), compiled)


@pytest.mark.quick("1.0-dtype0-torch", "0.6-dtype1-torch", "0.6-dtype0-kernel", "1.0-dtype2-kernel")
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_the_softmax(compiled: bool, dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    row = (torch.randn(2 * BLOCK + 37) * 2).to(dtype)
    count = 20_000
    uniforms = torch.rand(count, dtype=torch.float64)
    tokens, log_probs = draw(row, SamplingParams(temperature=temperature), uniforms, compiled)
    expected = (row.double() / temperature).softmax(-1)
    torch.testing.assert_close(log_probs, expected.log()[tokens], atol=2e-6, rtol=0)
    observed = torch.bincount(tokens, minlength=len(row)).double()
    common = expected * count >= 5
    chi_square = ((observed - expected * count) ** 2 / (expected * count))[common].sum()
    freedom = int(common.sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@both
def test_tokens_are_the_inverse_of_the_cumulative_distribution(compiled: bool) -> None:
    torch.manual_seed(1)
    row = torch.randn(3 * BLOCK + 1, dtype=torch.float64) * 3
    uniforms = grid(999)
    tokens, _ = draw(row, SamplingParams(), uniforms, compiled)
    expected = torch.searchsorted(row.softmax(-1).cumsum(-1), uniforms, right=True)
    assert torch.equal(tokens, expected)


@both
@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1])
def test_the_ends_of_the_unit_interval_are_tokens(compiled: bool, vocabulary: int) -> None:
    row = torch.zeros(vocabulary)
    row[0] = row[-1] = -torch.inf if vocabulary > 2 else 0.0
    for temperature in (1.0, 0.01):
        ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
        tokens, log_probs = draw(row, SamplingParams(temperature=temperature), ends, compiled)
        assert tokens.tolist() == ([1, vocabulary - 2] if vocabulary > 2 else [0, vocabulary - 1])
        assert bool(log_probs.isfinite().all())


@both
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=13, temperature=1.7),
        SamplingParams(top_k=10**6),
        SamplingParams(top_p=0.3),
        SamplingParams(top_p=0.95, temperature=0.7),
        SamplingParams(top_p=0.999999),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.02, temperature=1.3),
    ],
    ids=str,
)
def test_the_tokens_that_can_come_are_those_of_transformers(params: SamplingParams, compiled: bool) -> None:
    torch.manual_seed(2)
    row = torch.randn(700, dtype=torch.float64) * 2
    scores = (row / params.temperature)[None]
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    probabilities = scores[0].softmax(-1)
    # Every token that transformers would sample, hit in the middle of its interval.
    kept = probabilities.nonzero()[:, 0]
    middle = (probabilities.cumsum(-1) - probabilities / 2)[kept]
    tokens, log_probs = draw(row, params, middle, compiled)
    assert torch.equal(tokens, kept)
    full = (row / params.temperature).log_softmax(-1)
    torch.testing.assert_close(log_probs, full[kept], atol=1e-12, rtol=0)


def without(banned: Mapping[int, tuple[int, ...]]) -> dict[int, Callable[[torch.Tensor], torch.Tensor]]:
    """The edits that rule these tokens out, by row."""
    return {
        row: lambda logits, tokens=tokens: logits.index_fill(0, torch.tensor(tokens), -torch.inf)
        for row, tokens in banned.items()
    }


@both
def test_rows_do_not_influence_each_other(compiled: bool) -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 611) * 3
    kinds = [SamplingParams(temperature=t, top_k=k, top_p=p) for t in (0.0, 0.5, 1.0) for k in (0, 7) for p in (0.7, 1)]
    params = [kinds[i % len(kinds)] for i in range(40)]
    banned = {i: (int(logits[i].argmax()), 5) for i in range(0, 40, 3)}
    uniforms = torch.rand(40, dtype=torch.float64)
    tokens, log_probs = sample(logits.clone(), uniforms, params, compiled, without(banned))
    for i in range(40):
        edits = without({0: banned[i]} if i in banned else {})
        token, log_prob = sample(logits[i : i + 1].clone(), uniforms[i : i + 1], [params[i]], compiled, edits)
        assert (token.item(), log_prob.item()) == (tokens[i].item(), log_probs[i].item())
        assert i not in banned or token.item() not in banned[i]


@both
def test_greedy_is_the_first_of_the_largest_at_temperature_one(compiled: bool) -> None:
    row = torch.zeros(600)
    row[[300, 301, 599]] = 4.0
    tokens, log_probs = draw(row, SamplingParams(temperature=0, top_p=0.5), grid(3), compiled)
    assert tokens.tolist() == [300] * 3
    torch.testing.assert_close(log_probs, row.double().log_softmax(-1)[[300] * 3], atol=1e-6, rtol=0)


def test_kernel_and_torch_choose_alike() -> None:
    torch.manual_seed(4)
    logits = torch.randn(200, 1031) * 4
    uniforms = torch.rand(200, dtype=torch.float64)
    options = itertools.product((0, 1.0), (0, 9), (0.9, 1), (0, 0.1))
    kinds = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in options]
    params = [kinds[i % len(kinds)] for i in range(200)]
    kernel = sample(logits.clone(), uniforms, params, True)
    torch_code = sample(logits.clone(), uniforms, params, False)
    assert torch.equal(kernel[0], torch_code[0])
    torch.testing.assert_close(kernel[1], torch_code[1], atol=2e-6, rtol=0)


@both
def test_logits_that_are_not_finite_give_no_finite_log_prob(compiled: bool) -> None:
    for bad in (torch.nan, torch.inf):
        row = torch.zeros(300)
        row[7] = bad
        _, log_probs = draw(row, SamplingParams(), grid(2), compiled)
        assert not bool(log_probs.isfinite().any())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"max_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"stop": 3},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("max_new_tokens", "max_new")):
        SamplingParams(**wrong)  # type: ignore[arg-type]


@both
def test_a_banned_token_that_had_all_the_probability_leaves_a_proper_choice(compiled: bool) -> None:
    logits = torch.zeros(2, 300)
    logits[:, 7] = 500.0
    params, edits = [SamplingParams(), SamplingParams(temperature=0)], without({0: (7,), 1: (7,)})
    tokens, log_probs = sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), params, compiled, edits)
    # Uniform over the 299 others; its log-prob is that of the full distribution.
    assert tokens.tolist() == [150, 0]
    torch.testing.assert_close(log_probs, torch.full((2,), -500.0, dtype=torch.float64))


@both
def test_an_edit_that_leaves_nothing_is_told_by_the_log_prob(compiled: bool) -> None:
    params, edits = [SamplingParams()] * 2, {1: lambda logits: logits - torch.inf}
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    tokens, log_probs = sample(torch.zeros(2, 300), half, params, compiled, edits)
    assert tokens[0] == 150
    assert log_probs.isfinite().tolist() == [True, False]
    assert log_probs[1] == -torch.inf


@both
def test_broken_weights_are_no_choice_of_an_edit(compiled: bool) -> None:
    logits = torch.zeros(3, 40)
    logits[:2] = torch.nan
    edits = {0: lambda x: x, 2: lambda x: torch.full_like(x, -torch.inf)}
    _, log_probs = sample(logits, grid(3), [SamplingParams()] * 3, compiled, edits)
    assert log_probs[:2].isnan().all() and log_probs[2] == -torch.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_new_tokens", value) for value in (2.5, "5", None)],
        *[("top_k", value) for value in (-1, 1.5, 2**31)],
        *[("temperature", value) for value in (None, float("nan"), -1, 1e-46, float("inf"))],
        *[("stop", value) for value in (3, ("a", 3), (b"a",), ("",))],
        *[("stop_token_ids", value) for value in (5, (-1,), ("a",), (True,))],
        *[(name, True) for name in ("max_new_tokens", "top_k", "temperature", "top_p")],
    ],
)
def test_sampling_parameters_that_cannot_be_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^SamplingParams\.{name}(\.\d)?: must"):
        SamplingParams(**{name: value})


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    params = SamplingParams(np.int64(5), stop=["a"], stop_token_ids=[3], temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert params == SamplingParams(5, stop=("a",), stop_token_ids=(3,), temperature=0.5)
    assert type(params.max_new_tokens) is int and SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]


def test_a_prompt_is_token_ids() -> None:
    assert Request("x", torch.tensor([5, 6])).prompt_tokens == [5, 6]  # type: ignore[arg-type]
    for prompt in ([5.5], "ab", None, [[5]], [None]):
        with pytest.raises(RolloutError, match="'x': its prompt must be token ids"):
            Request("x", prompt)  # type: ignore[arg-type]
