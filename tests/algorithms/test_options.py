"""Every option of every algorithm is read or refused: another value gives other losses or other samples on a generated
input, or an error that names it."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from random import Random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.algorithms.support import OFFLINE, ONLINE, experience, loss_input, preferences
from verl._base.record import SettingsError
from verl.algorithms import make_algorithm
from verl.algorithms.advantages import grpo
from verl.algorithms.base import BaseAlgorithm, _option_types
from verl.algorithms.losses import aggregation_weights
from verl.batch import Batch
from verl.errors import VerlError

#: What no type says: values of options that are a text or tuples.
TEXTS = {"filter_metric": ("cost",), "prefixes": (("bad ", "good "),)}
#: One of each base class, and those with options that others decide about; the slow test has them all.
QUICK = ("constrained_decoding", "dapo", "dpo", "gpg", "grpo_passk", "kto", "orpo", "ppo", "safe_rlhf")
NUMBERS = (0.0, 0.02, 0.3, 0.45, 0.9, 1.1, 2.5, 40.0, -0.5)


#: Inputs that are tried at most.
TRIES = 200
#: How far the policies of a batch are apart, in nats a token: far off-policy first.
SPREADS = (3.0, 0.1, 1.0, 0.01)


@cache
def samples(name: str, number: int) -> Batch:
    """Generated rows, the same for a number: ragged, in groups of five, with rewards, costs and labels; the policies
    that sampled them, that trains and that is the reference are near each other or far apart."""
    draw = Random(number)
    spread = SPREADS[number // 2 % len(SPREADS)]
    algorithm = make_algorithm(name)
    if name in OFFLINE:
        return preferences([draw.randint(1, 6) for _ in range(8)], number)
    lengths = [draw.randint(1, 7) for _ in range(20)]
    rewards = [draw.choice([0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 2.0]) for _ in range(20)]
    rewards[:5] = [rewards[0]] * 5  # a group that has nothing to tell
    old = random(sum(lengths), number, -3, -1)
    columns: dict[str, Any] = {
        policy: (old + random(len(old), number + shift, -spread, spread), lengths)
        for shift, policy in enumerate(("log_probs", "rollout_log_probs", "ref_log_probs"), start=1)
    }
    if algorithm.greedy_baseline:
        columns["baseline"] = [row % 5 == 0 for row in range(20)]
    finish = draw.choices(["stop", "reject", "length"], k=20)
    level = draw.choice([-0.8, 0.0, 5.0])  # lambda meets both of its bounds
    cost = [level + draw.uniform(-0.2, 0.2) for _ in range(20)]
    groups = [f"g{row // 5}" for row in range(20)]
    return experience(lengths, groups, rewards, number, finish=finish, cost=cost, **columns)


def random(shape: int, seed: int, low: float, high: float) -> Tensor:
    values = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return low + (high - low) * values


def result(name: str, options: dict[str, Any], number: int) -> list[Any]:
    """What an algorithm makes of two generated batches, one after the other, since some options act by what they leave
    behind: the samples that it trains on, losses and gradients."""
    return [answer["learned"] for answer in answers(name, make_algorithm(name, **options), number)]


def answers(name: str, algorithm: BaseAlgorithm, number: int = 0) -> list[dict[str, Any]]:
    """The same with all that it says of them: metrics, state."""
    return [answer(name, algorithm, 2 * number + second) for second in (0, 1)]


def answer(name: str, algorithm: BaseAlgorithm, number: int) -> dict[str, Any]:
    batch = samples(name, number)
    learned: list[Any] = [algorithm.keep(batch), list(algorithm.prompt_prefixes(batch) or ())]
    batch = algorithm.extend(batch)
    if "mismatched" in batch:
        tokens = batch.lengths("response_tokens")
        for seed, column in enumerate(("log_probs", "ref_log_probs"), start=number):
            batch = batch.drop([column]).add({column: (random(sum(tokens), seed, -2, 0), tokens)})
    prepared, metrics = algorithm.prepare(batch)
    learned += [list(prepared["id"]) if "id" in prepared else len(prepared)]
    learned += [list(algorithm.prompt_prefixes(prepared) or ())]
    for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
        learned += losses(algorithm, role, prepared, number)
    return {"learned": learned, "told": [metrics, algorithm.state_dict()]}


def losses(algorithm: BaseAlgorithm, role: str, batch: Batch, number: int) -> list[Any]:
    """The loss and its gradients."""
    tokens = sum(batch.lengths("response_tokens"))
    spread = SPREADS[number // 2 % len(SPREADS)]
    objective = algorithm.objective(role)
    old = batch.tensor("log_probs" if "log_probs" in batch else "old_log_probs", torch.float64)
    outputs = {
        "log_probs": (old + random(tokens, number + 4, -spread, spread)).clamp(max=0),
        "entropy": random(tokens, number + 5, 0, 2),
    }
    outputs = {"values": random(tokens, number, -3, 3)} if role != "actor" else outputs
    outputs = {"scores": random(len(batch), number, -2, 2)} if algorithm.head == "score" else outputs
    leaves = [tensor.requires_grad_() for tensor in outputs.values()]
    x = loss_input(objective, batch, **outputs)
    total = objective.compute_loss(x).total
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [float(total.detach()), *([] if g is None else g.tolist() for g in gradients)]


def is_same(a: Any, b: Any) -> bool:
    """Whether two results differ by no more than rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) or (a != a and b != b)
    return bool(a == b)


def other_values(algorithm: BaseAlgorithm, option: str) -> Iterator[Any]:
    """Values of the option's type that are not its default."""
    hint = _option_types(type(algorithm))[option]
    default = getattr(type(algorithm), option)
    values = itertools.chain(TEXTS.get(option, ()), _values(hint))
    yield from (value for value in values if not (value == default and type(value) is type(default)))


def _values(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        yield from arguments
    elif hint is type(None):
        yield None
    elif hint is bool:
        yield from (True, False)
    elif hint is int:
        yield from (1, 2, 3, 50)
    elif hint is float:
        yield from NUMBERS
    elif typing.get_origin(hint) is typing.Annotated:
        yield from _values(arguments[0])
    else:
        for argument in arguments:
            yield from _values(argument)


#: Options without which others have no value that is allowed.
PARTNERS = {
    "overlong_length": {"overlong_buffer": 2},
    "label_smoothing": {"loss_type": "aot"},
    "kl_target": {"kl_in": "loss", "kl_coef": 0.1},
}


def settings(name: str) -> Iterator[dict[str, Any]]:
    """Settings beside which each option is tried: the defaults, and each choice that decides what else is read."""
    algorithm = make_algorithm(name)
    yield {}
    for field in fields(algorithm):
        values = [v for v in other_values(algorithm, field.name) if v is None or isinstance(v, str | bool)]
        for value in [*values, *([7] if field.name in PARTNERS and not values else [])]:
            yield {field.name: value}
    for option, partner in PARTNERS.items():
        if hasattr(algorithm, option):
            yield {option: {"overlong_length": 5, "label_smoothing": 0.2, "kl_target": 0.05}[option], **partner}
    if hasattr(algorithm, "lambda_lr"):
        yield {"lambda_lr": 0}
    if hasattr(algorithm, "rollout_rs"):
        yield {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}


def check(name: str, setting: dict[str, Any]) -> set[str]:
    """The options that change the result beside this setting; each other one must be refused by name."""
    try:
        usual = [result(name, setting, 0)]
    except VerlError:
        return set()  # which settings go together is the matter of other tests
    algorithm, read = make_algorithm(name), set()
    for option in (field.name for field in fields(algorithm) if field.init):
        same = [setting.get(option), getattr(algorithm, option)] if option in setting else []
        values = [value for value in other_values(algorithm, option) if value not in same]
        if is_read(name, setting, option, values, usual):
            read.add(option)
    return read


def is_read(name: str, setting: dict[str, Any], option: str, values: list[Any], usual: list[Any]) -> bool:
    """Whether one of the values changes the result of a generated input; False: all are refused by name, but for None,
    which asks for nothing. `usual`: results without the option, so far."""
    for number in range(TRIES):
        if number == len(usual):
            usual.append(result(name, setting, number))
        accepted = []
        for value in values:
            try:
                after = result(name, {**setting, option: value}, number)
            except VerlError as error:
                if not any(key in str(error) for key in (option, *setting)):
                    raise
                continue
            if not is_same(after, usual[number]):
                return True
            accepted.append(value)
        values = accepted
        if all(value is None for value in values):
            return False
    pytest.fail(f"{name} {setting}: {option} may be {values}, and nothing changes in any of {TRIES} generated inputs")


@pytest.mark.parametrize("name", QUICK)
def test_an_option_changes_the_result_or_is_refused(name: str) -> None:
    check(name, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONLINE, *OFFLINE])
def test_an_option_is_read_beside_some_setting_and_refused_beside_the_others(name: str) -> None:
    read = set().union(*(check(name, setting) for setting in settings(name)))
    algorithm = make_algorithm(name)
    never = {*algorithm.unread} | ({"loss_scale_factor"} if "loss_agg_mode" in algorithm.unread else set())
    assert {field.name for field in fields(algorithm) if field.init} - read == never


@pytest.mark.parametrize("value", [True, "0.3", math.nan, math.inf, -math.inf, -1, [0.1], {}, 10**400])
@pytest.mark.parametrize(("name", "option"), [("grpo", "clip_ratio"), ("ppo", "gamma"), ("kto", "beta")])
def test_types_are_strict_and_numbers_finite(name: str, option: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"^{name}\.{option}: must be .*, not "):
        make_algorithm(name, **{option: value})


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"^ppo\.kl_in: must be one of .*; ppo\.gamma: must be at most 1.*, not 2"):
        make_algorithm("ppo", gamma=2, kl_in="los")
    with pytest.raises(SettingsError, match=r"reward_conditioned\.prefixes: must have at least 2 items"):
        make_algorithm("reward_conditioned", prefixes=["one"])
    assert make_algorithm("reward_conditioned", prefixes=["a", "b"]).prefixes == ("a", "b")  # type: ignore[attr-defined]


def test_numbers_of_options_are_not_rounded_to_fp32() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    assert grpo(rewards, groups, False).tolist() == [reward - 0.75 for reward in rewards.tolist()]
    ones = torch.ones(3) != 0
    weights = aggregation_weights(ones, torch.tensor([0, 1, 1]), 2, "seq-mean-token-sum-norm", 7.3)
    assert weights.tolist() == [1 / (2 * 7.3)] * 3
    algorithm = make_algorithm("kto", desirable_weight=1.1, undesirable_weight=0.7)
    columns = {"label": torch.tensor([1.0, 0.0]), "kto_kl": torch.zeros(2), "ref_log_probs": torch.zeros(2)}
    batch = Batch.from_columns({"group": ["a", "b"], "response_tokens": [[1], [1]]})
    x = loss_input(algorithm, batch, log_probs=torch.zeros(2, dtype=torch.float64))
    loss = algorithm.compute_loss(replace(x, columns={k: v.double() for k, v in columns.items()}))
    assert float(loss.total) == (1.1 * 0.5 + 0.7 * 0.5) / 2
