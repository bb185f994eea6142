"""Episodes of several trajectories, against the plain reference; and the laws that hold for any of them (fp64)."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms import plain_episodes as plain
from tests.algorithms.plain_episodes import Episode, Token, Trajectory
from tests.algorithms.support import loss_input
from tests.properties import examples
from verl.algorithms import make_algorithm
from verl.algorithms.base import BaseAlgorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import DataError
from verl.training.micro_batch import zero_gradient_rows
from verl.workers.update import MiniBatchPlan, mini_batches

COMPARING = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "gspo"]
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SEEDS = st.integers(0, 10_000)
Key = tuple[str, int]


def some_episodes(seed: int, *, own: bool = True, calls: bool = True) -> list[Episode]:
    """Three prompts; ties, episodes that are left out, empty trajectories, sub-agents with and without rewards."""
    rng = random.Random(seed)
    episodes = []
    for group in range(3):
        for number in range(rng.randint(1, 4)):
            ids = iter(range(1000))
            reward = rng.choice([0.0, 1.0, 1.0, 0.25, None])
            whole = Episode(f"g{group}/{number}", f"g{group}", reward)
            for _ in range(rng.randint(1, 3)):
                tokens = [some_token(next(ids), rng, calls) for _ in range(rng.randint(0, 5))]
                name = rng.choice(["", "critic"])
                has_own = own and name and rng.random() < 0.6
                whole.trajectories.append(Trajectory(tokens, name, rng.choice([0.0, 1.0, 0.5]) if has_own else None))
            episodes.append(whole)
    return episodes


def some_token(number: int, rng: random.Random, calls: bool) -> Token:
    token = Token(number, rng.random() < 0.75, rng.uniform(-2, -0.5))
    token.new = token.old + rng.uniform(-0.4, 0.4)
    if calls and token.sampled and rng.random() < 0.2:
        token.reward = rng.choice([0.5, -0.25])
    return token


def batch_of(episodes: Sequence[Episode], rng: random.Random | None = None, **columns: Any) -> Batch:
    """One row a trajectory, in a random order of rows if there is an `rng`."""
    rows = [(episode, trajectory) for episode in episodes for trajectory in episode.trajectories]
    if rng is not None:
        rng.shuffle(rows)
    doubles = lambda values: pa.array(values, pa.large_list(pa.float64()))  # noqa: E731
    tokens = [trajectory.tokens for _, trajectory in rows]
    return Batch.from_columns(
        {
            "id": [f"{episode.id}.{number}" for number, (episode, _) in enumerate(rows)],
            "group": [episode.group for episode, _ in rows],
            "episode": [episode.id for episode, _ in rows],
            "trajectory": pa.array([trajectory.name or None for _, trajectory in rows], pa.string()),
            "trajectory_reward": pa.array([trajectory.reward for _, trajectory in rows], pa.float64()),
            "reward": [episode.reward for episode, _ in rows],
            "prompt_tokens": [[1]] * len(rows),
            "response_tokens": [[token.id for token in row] for row in tokens],
            "response_mask": [[int(token.sampled) for token in row] for row in tokens],
            "call_rewards": doubles([[token.reward for token in row] for row in tokens]),
            "log_probs": doubles([[token.old for token in row] for row in tokens]),
            **{name: of(rows) for name, of in columns.items()},
        }
    )


def new_log_probs(prepared: Batch, episodes: Sequence[Episode]) -> torch.Tensor:
    new = {(e.id, token.id): token.new for e in episodes for t in e.trajectories for token in t.tokens}
    return torch.tensor([new[key] for key in keys(prepared)], dtype=torch.float64, requires_grad=True)


def keys(batch: Batch) -> list[Key]:
    """The episode and the id of each token."""
    columns = zip(batch["episode"], batch["response_tokens"], strict=True)
    return [(episode, token) for episode, tokens in columns for token in tokens]


def by_token(prepared: Batch, values: torch.Tensor) -> dict[Key, float]:
    """Numbers of the tokens that are trained."""
    mask = Responses(prepared).trained.tolist()
    return {key: value for key, value, m in zip(keys(prepared), values.tolist(), mask, strict=True) if m}


def gradient(algorithm: BaseAlgorithm, episodes: Sequence[Episode]) -> dict[Key, float]:
    """Of the log-prob of each token that is trained."""
    prepared = algorithm.prepare(batch_of(episodes))[0]
    if not len(prepared):
        return {}
    log_probs = new_log_probs(prepared, episodes)
    algorithm.compute_loss(loss_input(algorithm, prepared, log_probs=log_probs)).total.backward()
    assert log_probs.grad is not None
    return by_token(prepared, log_probs.grad)


@pytest.mark.parametrize("name", COMPARING)
@examples(60)
@given(seed=SEEDS)
def test_advantages_are_those_of_the_reference(name: str, seed: int) -> None:
    episodes = some_episodes(seed)
    prepared = make_algorithm(name).prepare(batch_of(episodes, random.Random(seed)))[0]
    assert by_token(prepared, prepared.tensor("advantages")) == pytest.approx(
        plain.advantages(name, episodes), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["grpo", "gpg", "gspo"])
@examples(40)
@given(seed=SEEDS)
def test_the_loss_is_that_of_the_reference(name: str, mode: str, seed: int) -> None:
    """In any cut into micro-batches, which may divide an episode; rows without a gradient left out."""
    episodes, rng = some_episodes(seed), random.Random(seed)
    algorithm = make_algorithm(name, loss_agg_mode=mode)
    prepared = algorithm.prepare(batch_of(episodes, rng))[0]
    if not len(prepared):
        return
    log_probs = new_log_probs(prepared, episodes)
    needs = algorithm.objective("actor").loss_needs
    leave = zero_gradient_rows(prepared, algorithm.token_weights(prepared), needs)
    rows = [row for row in range(len(prepared)) if row not in leave]
    rng.shuffle(rows)
    parts = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    total = sum(
        float(algorithm.compute_loss(loss_input(algorithm, prepared, part, log_probs=log_probs)).total.detach())
        for part in parts
    )
    assert total == pytest.approx(plain.loss(name, mode, episodes), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@examples(40)
@given(seed=SEEDS)
def test_discounting_runs_along_one_trajectory(gamma: float, seed: int) -> None:
    """GAE of a critic that says 0, with lambda 1, is the same."""
    episodes = some_episodes(seed)
    zeros = pa.array([[0.0] * len(t.tokens) for e in episodes for t in e.trajectories], pa.large_list(pa.float64()))
    batch = batch_of(episodes).add({"values": zeros})
    critic = make_algorithm("ppo", gamma=gamma, kl_in="none", kl_target=None).prepare(batch)[0]
    expected = {
        key: value for e in episodes if e.reward is not None for key, value in plain.discounted(e, gamma).items()
    }
    assert by_token(critic, critic.tensor("returns")) == pytest.approx(expected, abs=1e-9)
    plus = make_algorithm("reinforce_plus_plus", gamma=gamma).prepare(batch)[0]
    got = by_token(plus, plus.tensor("advantages"))
    spread = torch.tensor([*expected.values()], dtype=torch.float64)
    if len(spread) > 1:
        white = (spread - spread.mean()) * (spread.var() + 1e-8).rsqrt()
        assert got == pytest.approx(dict(zip(expected, white.tolist(), strict=True)), abs=1e-7)


@examples(60)
@given(seed=SEEDS)
def test_a_split_at_a_call_changes_no_gradient_of_token_mean_grpo(seed: int) -> None:
    """What stands before the cut is the prompt of the second part."""
    rng = random.Random(seed)
    episodes = some_episodes(seed, own=False)
    split = copy.deepcopy(episodes)
    for episode in split:
        parts = []
        for trajectory in episode.trajectories:
            cut = rng.randint(0, len(trajectory.tokens))
            parts += [Trajectory(trajectory.tokens[:cut]), Trajectory(trajectory.tokens[cut:])]
        episode.trajectories = parts
    whole = gradient(make_algorithm("grpo"), episodes)
    assert gradient(make_algorithm("grpo"), split) == pytest.approx(whole, abs=1e-12, rel=0)
    assert whole.keys() == gradient(make_algorithm("grpo"), split).keys()


@examples(60)
@given(seed=SEEDS)
def test_a_branch_that_is_not_trained_changes_no_gradient_of_token_mean_grpo(seed: int) -> None:
    episodes = some_episodes(seed)
    more = copy.deepcopy(episodes)
    for episode in more:
        read = [Token(500 + number, False) for number in range(3)]
        episode.trajectories.append(Trajectory(read))
    whole = gradient(make_algorithm("grpo"), episodes)
    assert gradient(make_algorithm("grpo"), more) == pytest.approx(whole, abs=1e-12, rel=0)


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_with_one_episode_that_counts_is_left_out_whole(name: str) -> None:
    turns = [Trajectory([Token(0, True)]), Trajectory([Token(1, True)], "critic", 0.5)]
    one, other, alone = (Episode(f"{g}/{i}", g, r, turns) for g, i, r in (("a", 0, 1.0), ("a", 1, None), ("b", 0, 0.5)))
    prepared, metrics = make_algorithm(name).prepare(batch_of([one, other, alone]))
    assert set(prepared["episode"]) == {"b/0"}  # one was planned
    assert (metrics["abstained"], metrics["left_alone"]) == (1.0, 1.0)
    assert len(make_algorithm("reinforce_plus_plus").prepare(batch_of([one, other, alone]))[0]) == 4


def test_algorithms_of_pairs_refuse_several_trajectories_by_name() -> None:
    turns = [Trajectory([Token(0, True)]), Trajectory([Token(1, True)])]
    batch = batch_of([Episode("a/0", "a", 1.0, turns), Episode("a/1", "a", 0.0, turns)])
    for name in ("dpo", "ipo", "simpo", "orpo", "kto"):
        with pytest.raises(DataError, match=f"'{name}' compares responses.*'a/0' has 2 trajectories"):
            make_algorithm(name).extend(batch)
    single = batch_of([Episode("a/0", "a", 1.0, turns[:1]), Episode("a/1", "a", 0.0, turns[1:])])
    assert len(make_algorithm("dpo").extend(single)) == 2


def test_dapo_keeps_prompts_whose_episodes_differ() -> None:
    """Of two episodes alike, one of which has several trajectories, nothing is learned."""
    two = [Trajectory([Token(0, True)]), Trajectory([Token(1, True)])]
    alike = [Episode("a/0", "a", 1.0, two), Episode("a/1", "a", None, two[:1])]
    differ = [Episode("b/0", "b", 1.0, two), Episode("b/1", "b", 0.0, two[:1])]
    assert make_algorithm("dapo").keep(batch_of([*alike, *differ])) == [False, False, False, True, True, True]
    assert make_algorithm("grpo").needs(batch_of(differ), "actor") == [True, True, True]
    equal = [Episode("c/0", "c", 1.0, two), Episode("c/1", "c", 1.0, two[:1])]
    assert make_algorithm("grpo").needs(batch_of(equal), "actor") == [False, False, False]


@examples(30)
@given(seed=SEEDS)
def test_mini_batches_are_of_episodes_and_divide_none(seed: int) -> None:
    episodes = some_episodes(seed)
    batch = batch_of(episodes, random.Random(seed))
    cuts = [rows for (rows,) in mini_batches([batch], MiniBatchPlan(mini_batch_size=2), 0)]
    assert len(cuts) <= -(-len(episodes) // 2)
    named = [name for rows in cuts for name in dict.fromkeys(rows["episode"])]
    assert sorted(named) == sorted(episode.id for episode in episodes)
