"""Episodes under an actor and a trainer: real engine, real updates, tiny model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from verl.algorithms.ppo import PPO
from verl.batch import Batch
from verl.errors import RolloutError
from verl.report.samples import permuted, renamed
from verl.rollout.base import SamplingParams
from verl.rollout.episode import Client
from verl.rollout.turns import Turns

TOOL = [70, 71, 72]


async def interrupted(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
    """Three turns of four tokens with a tool's tokens between them; some rows go wrong."""
    if row["id"].endswith("/1") and row["group"].endswith(".1"):
        raise KeyError("no tool")
    turns = Turns(rejected=1)
    for turn in range(3):
        if turn:
            turns.read(TOOL)
        turns.wrote(await client.generate([*row["prompt_tokens"], *turns.response_tokens], _short(client.params)))
    return [turns]


def _short(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, temperature=params.temperature, ignore_eos=True)


def actor_of(path: Path, **options: Any) -> verl.Actor:
    return verl.Actor.from_pretrained(str(path), optim={"lr": 1e-2}, dtype="float32", **options)


def test_what_the_policy_wrote_is_scored_as_one_sequence(tiny: Path) -> None:
    actor = actor_of(tiny, episode=interrupted)
    rows = actor.generate_sequences(["Once", "In the beginning"], n=3)
    assert [len(tokens) for tokens in rows["response_tokens"]] == [18, 18, 18, 18, 0, 18]
    assert rows["finish"] == ["length"] * 4 + ["abort", "length"]
    assert [error is None for error in rows["episode_error"]] == [True] * 4 + [False, True]
    assert "KeyError: 'no tool'" in rows["episode_error"][4]
    assert rows["rejected"] == [1, 1, 1, 1, 0, 1]
    # The engine's log-probs, over several requests, are the trainer's over the whole, where the policy wrote.
    again = actor.compute_log_probs(rows)["log_probs"]
    for row, log_probs in zip(rows.rows(), again, strict=True):
        assert row["response_mask"] == ([1] * 4 + [0] * 3) * 2 + [1] * 4 or not row["response_mask"]
        assert row["response_tokens"][4:7] == TOOL or not row["response_tokens"]
        for mask, engine, trainer in zip(row["response_mask"], row["rollout_log_probs"], log_probs, strict=True):
            assert math.isclose(engine, trainer, abs_tol=1e-4) if mask else engine == 0


def test_an_episode_repeats_itself(tiny: Path) -> None:
    def once() -> Batch:
        samples = actor_of(tiny, episode=interrupted).generate_sequences(["Once", "Then"], n=4, key="k")
        return samples.drop(["policy_id"])  # names the actor, which is another one each time

    assert once() == once()


def test_what_a_tool_wrote_teaches_nothing(tiny: Path) -> None:
    rows = actor_of(tiny, episode=interrupted).generate_sequences(["Once"], n=4, key="k")
    rewards = [0.0, 1.0, 0.5, 2.0]
    weights = []
    everything = [[1] * len(mask) for mask in rows["response_mask"]]
    for masked, mask in ((0.0, rows["response_mask"]), (-9.0, rows["response_mask"]), (0.0, everything)):
        actor = actor_of(tiny, algorithm="grpo", mini_batch_size=2)
        log_probs = [
            [lp if m else masked for lp, m in zip(lps, own, strict=True)]
            for lps, own in zip(rows["rollout_log_probs"], rows["response_mask"], strict=True)
        ]
        bare = rows.drop(["rollout_log_probs", "response_mask"])
        metrics = actor.update(bare.add({"rollout_log_probs": log_probs, "response_mask": mask}), rewards)
        assert metrics["grad_norm"] > 0
        weights.append(torch.cat([p.detach().flatten() for p in actor.model.parameters()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_trainer_steps_through_episodes_and_failures_abstain(tiny: Path) -> None:
    trainer = verl.Trainer(
        actor_of(tiny, episode=interrupted),
        reward_fn=lambda texts: [float(len(text)) for text in texts],
        algorithm="grpo",
        n=3,
        log_dir=False,
    )
    log = trainer.step(["Once", "In the beginning"])
    assert log["updated"] and log["reward/abstained"] == 1
    assert log["rollout/failed_episodes"] == 1
    assert log["rollout/rejection_rate"] == 0.5
    assert log["rollout/tokens"] == 5 * 12  # and not what the tool wrote


def test_an_episode_that_always_fails_ends_the_run(tiny: Path) -> None:
    async def broken(client: Client, row: Mapping[str, Any]) -> list[Turns]:
        raise KeyError("no tool")

    def trainer(**options: Any) -> verl.Trainer:
        actor = actor_of(tiny, episode=broken)
        return verl.Trainer(actor, reward_fn=lambda texts: [1.0] * len(texts), n=8, log_dir=False, **options)

    strict = trainer()
    for _ in range(7):
        assert strict.step(["Once"])["rollout/failed_episodes"] == 8
    with pytest.raises(RolloutError, match="every episode failed"):
        strict.check_failures()
    with pytest.raises(RolloutError, match=r"failed on 64 of the latest 64.*KeyError: 'no tool'"):
        strict.step(["Once"])
    tolerant = trainer(max_failed_episodes=1.0)
    for _ in range(9):
        tolerant.step(["Once"])
    tolerant.check_failures()


def test_an_episode_may_run_where_a_loop_runs(tiny: Path) -> None:
    async def inside() -> Batch:
        return actor_of(tiny, episode=interrupted).generate_sequences(["Once"], n=2)

    assert len(asyncio.run(inside())) == 2


def test_an_episode_has_its_own_deadline_and_one_response_a_row(tiny: Path) -> None:
    class Slow:
        deadline = 0.3

        async def __call__(self, client: Client, row: Mapping[str, Any]) -> list[Turns]:
            if row["id"].endswith("/0"):
                await asyncio.sleep(60)
            return []

    rows = actor_of(tiny, episode=Slow()).generate_sequences(["Once"], n=2)
    assert "took longer than 0.3 s" in rows["episode_error"][0]
    assert "gave 0 responses" in rows["episode_error"][1]


def test_an_engine_that_refuses_is_a_failed_episode_and_leaving_early_is_clean(tiny: Path) -> None:
    actor = actor_of(tiny, episode=interrupted)
    rows = verl.roles.actor.expand(actor.prompts(["Once", "Then"], "k"), 2)
    samples = actor.rollout(rows, actor.sampling)
    next(samples)
    samples.close()  # type: ignore[attr-defined]
    assert actor.group.worker.rollout_engine.unfinished == 0
    assert len(actor.generate_sequences(["Once"], n=2)) == 2


@pytest.mark.parametrize("end", ["abort", "reject"])
def test_what_was_not_finished_is_not_scored(end: str) -> None:
    seen: list[str] = []

    def score(texts: list[str]) -> list[dict[str, float]]:
        seen.extend(texts)
        return [{"score": 1.0, "part": 2.0} for _ in texts]

    rows = Batch.from_columns({"id": ["a", "b", "c"], "response": ["A", "B", "C"], "finish": ["stop", end, "length"]})
    scored = verl.Reward(score).get_reward(rows)
    assert seen == ["A", "C"]
    assert scored["reward"] == [1.0, None, 1.0] and scored["reward/part"] == [2.0, None, 2.0]
    assert scored["abstain_reason"] == [None, f"the response ended by {end}", None]


@pytest.mark.parametrize("offload", [False, True])
def test_an_offloaded_optimizer_has_no_gradients_during_a_rollout(tiny: Path, offload: bool) -> None:
    """Counted from inside of the rollout after an update."""
    held: list[int] = []

    async def counting(client: Client, row: Mapping[str, Any]) -> list[Turns]:
        weights = actor.group.worker.engine.optimizer.gradients.weights
        sums = [weight.gradient for weight in weights] + [weight.source.grad for weight in weights]
        held.append(sum(found.nbytes for found in sums if found is not None))
        return [Turns().wrote(await client.generate(row["prompt_tokens"], _short(client.params)))]

    actor: Any = actor_of(tiny, episode=counting, strategy="fsdp", fsdp_config={"optimizer_offload": offload})
    reward = lambda texts: [float(len(set(text))) for text in texts]  # noqa: E731
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False)
    assert trainer.step(["Once"])["updated"]
    held.clear()
    trainer.step(["Once"])
    assert len(held) == 4 and (max(held) == 0) == offload


def _split(turns: Turns, prompt: list[int]) -> list[Turns]:
    """The same turns as trajectories: the tool's tokens, and all before, are the prompt of the next."""
    starts = [0, 4 + len(TOOL), 2 * (4 + len(TOOL))]
    tokens, log_probs = turns.response_tokens, turns.rollout_log_probs
    return [
        Turns(
            tokens[start : start + 4],
            [1] * 4,
            log_probs[start : start + 4],
            policy_version=turns.policy_version,
            prompt_tokens=[*prompt, *tokens[:start]],
            reward=float(sum(tokens) % 5),
        )
        for start in starts
    ]


@pytest.mark.parametrize("plan", [{}, {"mini_batch_size": 4, "epochs": 2}])
def test_an_episode_that_is_split_at_its_turns_trains_the_same_weights(tiny: Path, plan: dict[str, int]) -> None:
    """By GRPO with `token-mean`, as far as the norms of Llama go, which are computed in fp32 in any model."""

    def trained(is_split: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        async def episode(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
            (turns,) = await interrupted(client, row)
            parts = _split(turns, row["prompt_tokens"])
            turns.reward = parts[0].reward
            return parts if is_split else [turns]

        actor = verl.Actor.from_pretrained(str(tiny), optim={"lr": 1e-3}, dtype="float64", episode=episode, **plan)
        trainer = verl.Trainer(actor, reward_fn=lambda texts: [0.0] * len(texts), algorithm="grpo", n=4, log_dir=False)
        log = trainer.step(["Once", "In the beginning"])
        return log, [parameter.detach() for parameter in actor.model.parameters()]

    (log, weights), (split_log, split_weights) = trained(False), trained(True)
    assert (log["episodes/trajectories"], split_log["episodes/trajectories"]) == (1.0, pytest.approx(22 / 8))
    assert split_log["update/steps/actor"] == log["update/steps/actor"]
    for name in ("reward", "reward/std", "loss/actor", "grad_norm/actor", "episodes/left_out"):
        assert split_log[name] == pytest.approx(log[name], abs=1e-7)
    for mine, theirs in zip(split_weights, weights, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)


def test_a_critic_learns_along_each_trajectory_with_rewards_of_turns(tiny: Path) -> None:
    async def episode(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        first = Turns(reward=1.0, name="a").wrote(
            await client.generate(row["prompt_tokens"], _short(client.params)), 0.5
        )
        other = [*row["prompt_tokens"], *TOOL]
        second = Turns(prompt_tokens=other, name="b", own_reward=0.25)
        second.wrote(await client.generate(other, _short(client.params)))
        return [first, second]

    actor = actor_of(tiny, episode=episode)
    seen: list[Batch] = []

    class Seen(PPO):
        def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
            seen.append(super().prepare(batch)[0])
            return super().prepare(batch)

    algorithm = Seen(kl_in="none", kl_target=None)
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [0.0] * len(texts), algorithm=algorithm, n=2, log_dir=False)
    log = trainer.step(["Once", "In the beginning"])
    assert log["updated"] and log["reward"] == 1.0 and math.isfinite(log["loss/critic"])
    returns = [round(row[-1], 6) for row in seen[0]["returns"]]
    assert returns == [1.5, 0.25] * 4  # of the last token: the turn's reward and the episode's, or its own


def test_a_name_is_given_to_the_whole_episode() -> None:
    """Samples that waited in a buffer while a run was resumed may be called as new ones are."""
    names = {"id": ["g/0", "g/0.1"], "group": ["g", "g"], "episode": ["g/0", "g/0"]}
    samples = renamed(Batch.from_columns({**names, "reward": [1.0, 1.0]}), {"g/0"})
    assert samples["episode"] == ["~g/0", "~g/0"] and samples["id"] == ["~g/0", "~g/0.1"]
    rows = {"episode": ["a", "a", "b", "c", "c"], "reward": [1.0, 1.0, 2.0, 3.0, 3.0], "trajectory_reward": [0.0] * 5}
    dealt = permuted(Batch.from_columns(rows), seed=1)
    assert dealt["reward"][0] == dealt["reward"][1] and dealt["reward"][3] == dealt["reward"][4]
    assert sorted({*dealt["reward"]}) == [1.0, 2.0, 3.0] and "trajectory_reward" not in dealt
