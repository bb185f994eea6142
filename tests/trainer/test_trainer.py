"""The trainer: algorithms end to end beside a control, the plain loop, buffers, hooks, what goes wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl
import verl.trainer.task
from tests.trainer.cases import PROMPTS, SHORT, collected, low_bytes, make
from verl.data.buffers import DiskBuffer
from verl.errors import ConfigError, DataError, TrainingError
from verl.report.samples import permuted
from verl.roles.layouts import by_workers, lay_out
from verl.trainer.loop import check_learned
from verl.training.options import OptimConfig
from verl.weights.shard import checksum


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "n"), [("grpo", 8), ("ppo", 8), ("remax", 15)])
def test_algorithms_learn_and_their_control_does_not(tiny: Path, algorithm: str, n: int) -> None:
    curves = {}
    for lr in (1e-2, 0.0):
        trainer = make(tiny, algorithm, lr, n=n)
        curves[lr] = [trainer.step(PROMPTS)["reward"] for _ in range(40)]
    learned, control = (sum(curves[lr][-5:]) / 5 for lr in (1e-2, 0.0))
    assert learned > sum(curves[1e-2][:3]) / 3 + 0.2
    assert learned > control + 0.2
    assert abs(control - sum(curves[0.0][:5]) / 5) < 0.15


def test_a_plain_loop_is_the_trainer(tiny: Path) -> None:
    trainer = make(tiny, "grpo", n=4)
    for _ in range(3):
        trainer.step(PROMPTS)
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT, algorithm="grpo")
    reward = verl.Reward(reward_fn=low_bytes)
    for step in range(3):
        sequences = actor.generate_sequences(PROMPTS, n=4, key=f"s{step}")
        actor.update(sequences, reward.get_reward(sequences))
    assert checksum(actor.shards()) == checksum(trainer.actor.shards())


def test_fit_takes_any_iterable_and_says_when_it_ends(tiny: Path) -> None:
    trainer = make(tiny, "grpo", n=2)
    assert trainer.fit([PROMPTS, PROMPTS], steps=2)["updated"] and trainer.steps == 2
    with pytest.raises(DataError, match="ended after 3 steps"):
        trainer.fit((batch for batch in [PROMPTS]), steps=2)


def test_without_a_reference_there_is_no_kl(tiny: Path) -> None:
    """One update a step: the KL of the update's policy to the one that sampled is 0 whatever has moved."""
    record = make(tiny, "grpo", n=2).step(PROMPTS)
    assert record["policy/kl"] == pytest.approx(0, abs=1e-6) and "kl" not in record
    record = make(tiny, "grpo", n=2, kl_in="loss").step(PROMPTS)
    assert "kl" in record


def test_a_schedule_without_an_end_is_refused_before_anything_is_sampled(tiny: Path) -> None:
    endless, other = {"schedule": "cosine"}, verl.Actor(tiny)
    for actor, critic in ((verl.Actor(tiny, optim=endless), None), (other, verl.Critic(tiny, optim=endless))):
        with pytest.raises(ConfigError, match=r"optim.schedule=cosine.*set optim.total_steps"):
            verl.Trainer(actor, critic, reward_fn=low_bytes, algorithm="ppo", log_dir=False)
    with pytest.raises(ConfigError, match=r"optim.schedule=cosine"):
        verl.Updater("ppo", actor=verl.Actor(tiny, optim=endless))


def test_update_freq_waits_for_samples(tiny: Path) -> None:
    trainer = make(tiny, "grpo", n=2, buffer_size=64, update_freq=8)
    records = [trainer.step(PROMPTS) for _ in range(4)]
    assert [record["updated"] for record in records] == [False, True, False, True]
    assert "loss/actor" not in records[0] and isinstance(records[0]["reward"], float)


def test_samples_of_an_earlier_process_are_groups_of_their_own(tiny: Path, tmp_path: Path) -> None:
    """Both trainers call their first group s0.0; together they would be one group of two prompts."""
    for prompts in (["A", "B"], ["C", "D"], ["E", "F"]):
        buffer = DiskBuffer(tmp_path, 99)
        trainer = make(tiny, "grpo", n=2, buffer=buffer, update_freq=99)
        assert trainer.step(prompts)["updated"] is False
        samples = buffer.state()
        buffer.close()
    assert [[samples["prompt"][row] for row in rows] for rows in samples.group_indices()] == [[p] * 2 for p in "ABCDEF"]
    assert len(set(samples["id"])) == 12


@pytest.mark.slow
def test_samples_that_are_learned_from_at_once_need_no_room(tiny: Path) -> None:
    tight, roomy = (make(tiny, "grpo", n=2, buffer_size=size, update_freq=6) for size in (6, 64))
    for updated in (False, True, False, True):  # 4 samples a step: 4, 8, ...
        for trainer in (tight, roomy):
            assert trainer.step(PROMPTS)["updated"] is updated
    assert checksum(tight.actor.shards()) == checksum(roomy.actor.shards())


def test_models_may_be_given_as_they_are(tiny: Path, make_tiny: Callable[..., Path]) -> None:
    for critic in (str(tiny), AutoModelForCausalLM.from_pretrained(make_tiny("gpt2"))):
        actor = AutoModelForCausalLM.from_pretrained(tiny)
        trainer = verl.PPOTrainer(actor, critic, reward_fn=low_bytes, sampling=SHORT, log_dir=False)
        assert trainer.step(PROMPTS)["updated"] and trainer.actor.model is actor


def test_amp_is_of_actor_and_critic_or_refused(tiny: Path) -> None:
    critic = verl.Critic.from_pretrained(str(tiny))
    trainer = verl.PPOTrainer(str(tiny), critic, reward_fn=low_bytes, use_amp=True, log_dir=False)
    assert trainer.actor.train_options.use_amp and critic.train_options.use_amp
    actor = verl.Actor(str(tiny), sampling=SHORT)
    actor.generate_sequences(PROMPTS)
    for options in ({"use_amp": True}, {"strategy": "fsdp"}):
        with pytest.raises(ConfigError, match="the actor's workers are in place: say how they train"):
            verl.PPOTrainer(actor, reward_fn=low_bytes, log_dir=False, **options)  # type: ignore[arg-type]
    verl.PPOTrainer(actor, reward_fn=low_bytes, log_dir=False, use_amp=False, strategy="ddp")


def test_hooks_metrics_and_records(tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    actor = verl.Actor(str(tiny), sampling=SHORT)
    trainer = verl.PPOTrainer(actor=actor, reward_fn=low_bytes, log_dir=tmp_path, n=2)
    trainer.on_log_hook(lambda step, record: seen.append((step, record)))
    trainer.add_metric("longest", lambda batch: float(max(batch.lengths("response_tokens"))))
    trainer.step(PROMPTS)
    step, record = seen[0]
    assert step == 1 and record["longest"] == 6.0
    for name in ("reward", "reward/mean", "loss/actor", "loss/critic", "kl", "rollout/tokens_per_s"):
        assert isinstance(record[name], float), name
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    trainer.add_metric("none", lambda batch: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match="metric 'none' returned None: give one number"):
        trainer.step(PROMPTS)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_reward_that_abstains_leaves_the_step(tiny: Path) -> None:
    def sometimes(texts: list[str]) -> list[float | None]:
        return [None if i % 2 else value for i, value in enumerate(low_bytes(texts))]

    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    trainer = verl.Trainer(actor, reward_fn=sometimes, algorithm="grpo", n=4, log_dir=False)
    record = trainer.step(PROMPTS)
    assert record["reward/abstained"] == 4
    assert record["grad_norm/actor"] > 0


def test_a_step_without_any_reward_changes_nothing(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [None] * len(texts), algorithm="grpo", n=4, log_dir=False)
    before = checksum(actor.shards())
    record = trainer.step(PROMPTS)
    assert record["update/empty"] == 1.0 and record["updated"] is False
    assert checksum(actor.shards()) == before


def test_a_step_of_which_nothing_is_left_changes_nothing(tiny: Path) -> None:
    """No greedy sample has a reward to compare with; no sample has a cost."""

    def unless_greedy(texts: list[str], baseline: list[bool]) -> list[float | None]:
        return [None if greedy else 1.0 for greedy in baseline]

    def nothing(texts: list[str]) -> list[None]:
        return [None] * len(texts)

    cases: dict[str, dict[str, Any]] = {
        "remax": {"reward_fn": unless_greedy},
        "safe_rlhf": {"reward_fn": low_bytes, "cost": nothing, "n": 2},
    }
    for name, options in cases.items():
        actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
        trainer = verl.Trainer(actor, algorithm=name, log_dir=False, **options)
        before = checksum(actor.shards())
        record = trainer.step(PROMPTS)
        assert record["update/empty"] == 1.0 and record["updated"] is False
        assert checksum(actor.shards()) == before


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_step_whose_samples_the_algorithm_all_rejects_changes_nothing(tiny: Path, tasks: int) -> None:
    def alike(texts: list[str]) -> list[float]:
        return [1.0] * len(texts)

    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    if tasks == 1:
        trainer = verl.Trainer(actor, reward_fn=alike, algorithm="dapo", n=2, log_dir=False, max_resamples=1)
    else:
        several = [verl.Task(name, "dapo", {"reward": alike}, n=2) for name in ("one", "other")]
        trainer = verl.Trainer(actor, tasks=several, log_dir=False, max_resamples=1)
    before = checksum(actor.shards())
    prompts = PROMPTS if tasks == 1 else {"one": PROMPTS, "other": PROMPTS}
    assert trainer.step(prompts)["updated"] is False
    assert trainer.step(prompts)["update/empty"] == 1.0
    assert checksum(actor.shards()) == before
    with pytest.raises(TrainingError, match="none of 2 updates changed the policy: algorithm 'dapo'"):
        check_learned(trainer, {"reward": 1.0, "update/empty": 1.0})


def test_a_step_of_which_every_token_is_rejected_changes_nothing(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    options: dict[str, Any] = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.5, "n": 2}
    trainer = verl.Trainer(actor, reward_fn=low_bytes, algorithm="grpo", log_dir=False, **options)
    samples = collected(trainer, PROMPTS).rows
    far = {"rollout_log_probs": [[-50.0] * length for length in samples.lengths("response_tokens")]}
    before = checksum(actor.shards())
    record = trainer.step(samples.drop(["policy_id", *far]).add(far))
    assert record["update/empty"] == 1.0 and record["updated"] is False
    assert checksum(actor.shards()) == before and actor.policy_version == 0


def test_greedy_samples_are_not_among_the_samples_of_the_step(tiny: Path) -> None:
    seen: list[verl.Batch] = []
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), reward_fn=low_bytes, algorithm="remax", log_dir=False)
    trainer.add_metric("seen", lambda batch: seen.append(batch) or 0.0)
    record = trainer.step(PROMPTS)
    assert len(seen[0]) == len(PROMPTS) and not any(seen[0]["baseline"])
    assert record["reward"] == pytest.approx(sum(seen[0]["reward"]) / len(PROMPTS))
    assert record["rollout/tokens"] > sum(seen[0].lengths("response_tokens"))


@pytest.mark.parametrize("names", [["p", "q"], ["p~1", "q~1"], ["p", "p~1"]])
def test_rejected_prompts_alone_are_sampled_again_whatever_their_groups_are_called(
    tiny: Path, names: list[str]
) -> None:
    seen: list[str] = []

    def reward(texts: list[str], prompts: list[str]) -> list[float]:
        """One sample of two is right; of the first prompt at first both, which teaches nothing."""
        rewards = []
        for prompt in prompts:
            rewards.append(float(seen.count(prompt) % 2 or (prompt == PROMPTS[0] and seen.count(prompt) < 2)))
            seen.append(prompt)
        return rewards

    trainer = verl.Trainer(
        verl.Actor(str(tiny), sampling=SHORT), reward_fn=reward, algorithm="dapo", n=2, log_dir=False
    )
    batch = verl.Batch.from_rows([{"prompt": p, "group": g} for p, g in zip(PROMPTS[:2], names, strict=True)])
    drawn = collected(trainer, batch)
    samples, record = drawn.rows, trainer.task.record(drawn)
    assert (record["rollout/resamples"], record["rollout/rejected_prompts"]) == (1, 0)
    assert len(seen) == 6
    assert [[samples["prompt"][row] for row in group] for group in samples.group_indices()] == [
        [prompt] * 2 for prompt in (PROMPTS[1], PROMPTS[0])
    ]


def test_samples_of_another_temperature_are_recalled_at_it(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), sampling=SHORT)
    trainer = verl.Trainer(actor, reward_fn=low_bytes, algorithm="grpo", kl_in="loss", n=2, log_dir=False)
    hot = actor.generate_sequences(PROMPTS, n=2, temperature=0.5)
    recalled = collected(trainer, hot).rows["ref_log_probs"]
    assert recalled == actor.compute_ref_log_probs(hot)["ref_log_probs"]
    assert recalled != actor.compute_ref_log_probs(hot.drop(["temperature"]))["ref_log_probs"]


def test_an_evaluation_leaves_a_smoothed_reward_as_it_was(tiny: Path) -> None:
    reward = verl.Reward(low_bytes, smoothing=0.5)
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), reward=reward, algorithm="grpo", n=2, log_dir=False)
    trainer.step(PROMPTS)
    before = reward.state_dict()
    trainer.evaluate(["Q", "Why?"])
    assert reward.state_dict() == before and before["reward"]["mean"] is not None


def test_an_evaluation_scores_costs_and_does_not_count_as_failures_of_training(tiny: Path) -> None:
    def costs(texts: list[str]) -> list[float]:
        return [0.25] * len(texts)

    def low_unless_asked(texts: list[str], prompts: list[str]) -> list[float]:
        if "Why?" in prompts:
            raise ValueError("no answer is known")
        return low_bytes(texts)

    trainer = verl.Trainer(
        verl.Actor(str(tiny), sampling=SHORT),
        reward_fn=low_unless_asked,
        cost=costs,
        algorithm="safe_rlhf",
        n=2,
        log_dir=False,
    )
    found = trainer.evaluate(["Why?"] * 40)
    assert found.metrics["cost"] == 0.25 and found.metrics["abstained"] == 40.0
    trainer.check_failures()
    for _ in range(8):
        trainer.step(PROMPTS)
    trainer.evaluate(["Why?"] * 40)
    assert trainer.step(PROMPTS)["reward/abstained"] == 0


def test_permuted_rewards_take_costs_along_and_nothing_else_teaches(tiny: Path) -> None:
    count = 64
    columns = {"id": [str(i) for i in range(count)], "reward": [float(i) for i in range(count)]}
    more = {"cost": [-float(i) for i in range(count)], "token_rewards": [[1.0]] * count}
    batch = verl.Batch.from_columns({**columns, **more})
    dealt = permuted(batch, seed=0)
    assert sorted(dealt["reward"]) == batch["reward"] != dealt["reward"]
    assert dealt["cost"] == [-reward for reward in dealt["reward"]]
    assert "token_rewards" not in dealt and dealt["id"] == batch["id"]
    options: dict[str, Any] = {"algorithm": "dapo", "overlong_length": 8, "overlong_buffer": 4}
    with pytest.raises(ConfigError, match="overlong_length"):
        verl.Trainer(verl.Actor(str(tiny)), reward_fn=low_bytes, permute_rewards=True, **options)


@pytest.mark.parametrize("value", [None, float("nan"), 1e308])
def test_training_that_changed_nothing_is_no_success(tiny: Path, value: Any) -> None:
    reward = verl.Reward(lambda texts: [value] * len(texts), max_failure_rate=1.0)
    words = "reward '<lambda>' gave no finite number for any sample"
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), reward=reward, n=2, log_dir=False)
    before = checksum(trainer.actor.shards())
    with pytest.raises(TrainingError, match=f"none of 2 updates changed the policy: {words}"):
        trainer.fit([PROMPTS, PROMPTS], steps=2)
    assert checksum(trainer.actor.shards()) == before


def test_rounds_of_resampling_are_in_the_metrics(tiny: Path) -> None:
    seen: list[str] = []

    def reward(texts: list[str], prompts: list[str]) -> list[float | None]:
        """The first samples of each prompt are equal, and one of them has no reward: they are thrown away."""
        rewards: list[float | None] = []
        for prompt in prompts:
            drawn = seen.count(prompt)
            rewards.append(None if not drawn else 0.0 if drawn < 3 else float(drawn))
            seen.append(prompt)
        return rewards

    source = verl.Reward(reward, max_failure_rate=1.0)
    actor = verl.Actor(str(tiny), sampling=SHORT)
    trainer = verl.Trainer(actor, reward=source, algorithm="dapo", n=3, log_dir=False)
    drawn = collected(trainer, PROMPTS)
    samples, record = drawn.rows, trainer.task.record(drawn)
    assert record["rollout/resamples"] == 1 and len(samples) == 6 and len(seen) == 12
    assert record["rollout/tokens"] == 12 * SHORT.max_new_tokens
    rollouts = [span.seconds for span in trainer.runner.spans if span.node == "rollout"]
    assert record["time/rollout"] == pytest.approx(sum(rollouts), rel=0.1)
    assert record["reward/abstained"] == 2


def test_the_only_task_is_weighed_against_nothing(tiny: Path) -> None:
    task = verl.trainer.task.Task("letters", "grpo", {"reward": low_bytes}, n=2, sampling=SHORT)
    trainer = verl.Trainer(verl.Actor(str(tiny)), tasks=[task], log_dir=False)
    assert trainer.step(PROMPTS)["updated"] and trainer.n == 2
    other = verl.trainer.task.Task("digits", "grpo", {"reward": low_bytes}, share=2.0)
    with pytest.raises(ConfigError, match="leave share"):
        verl.Trainer(verl.Actor(str(tiny)), tasks=[other], log_dir=False)
    with pytest.raises(ConfigError, match="tasks have their own reward"):
        verl.Trainer(verl.Actor(str(tiny)), tasks=[task], reward_fn=low_bytes, log_dir=False)


def test_a_reward_that_hangs_abstains_within_its_deadline(tiny: Path) -> None:
    def hanging(texts: list[str]) -> list[float]:
        time.sleep(600)
        return [0.0]

    actor = verl.Actor(str(tiny), sampling=SHORT)
    reward = verl.Reward(hanging, timeout=0.5, retries=0, max_failure_rate=1.0)
    trainer = verl.Trainer(actor, reward=reward, algorithm="grpo", n=2, log_dir=False)
    began = time.perf_counter()
    record = trainer.step(PROMPTS)
    assert time.perf_counter() - began < 30
    assert record["reward/abstained"] == 4


def test_the_mismatch_of_engine_and_trainer_stays_flat_without_learning(tiny: Path) -> None:
    trainer = make(tiny, "grpo", 0.0, n=4)
    gaps = []
    for step in range(3):
        batch = collected(trainer, PROMPTS, str(step)).rows
        now = trainer.actor.compute_log_probs(batch).tensor("log_probs")
        gaps.append(float((now - batch.tensor("rollout_log_probs")).abs().max()))
        trainer.learn(batch)
    assert max(gaps) < 1e-4


def test_the_temperature_of_the_samples_is_that_of_the_log_probs(tiny: Path) -> None:
    sampling = verl.SamplingParams(max_new_tokens=8, temperature=0.5)
    trainer = verl.Trainer(str(tiny), reward_fn=low_bytes, n=4, sampling=sampling, log_dir=False)
    batch = collected(trainer, PROMPTS).rows
    now = trainer.actor.compute_log_probs(batch).tensor("log_probs")
    torch.testing.assert_close(now, batch.tensor("rollout_log_probs"), atol=1e-4, rtol=0)


def test_bad_arguments(tiny: Path, make_tiny: Callable[..., Path]) -> None:
    actor = verl.Actor(str(tiny))
    with pytest.raises(ConfigError, match="needs a reward"):
        verl.Trainer(actor)
    with pytest.raises(ConfigError, match="kl_coef"):
        verl.PPOTrainer(actor=actor, reward_fn=len, kl_coeff=0.1)
    with pytest.raises(ConfigError, match="did you mean"):
        verl.Trainer(actor, reward_fn=len, algorithm="gpro")
    for half in ({"checkpoint_dir": "checkpoints"}, {"save_every": 2}):
        with pytest.raises(ConfigError, match="need both"):
            verl.Trainer(actor, reward_fn=low_bytes, **half)
    with pytest.raises(ConfigError, match="keep_checkpoints is of automatic"):
        verl.Trainer(actor, reward_fn=low_bytes, keep_checkpoints=2)
    for name, value in (("n", 0), ("n", 2.5), ("update_freq", 0), ("buffer_size", 0), ("max_skipped_updates", 0)):
        with pytest.raises(ConfigError, match=rf"Trainer\.{name}: must be .*, not {value}"):
            verl.Trainer(actor, reward_fn=low_bytes, **{name: value})
    with pytest.raises(ConfigError, match="max_resamples: must be at least 0"):
        verl.Trainer(actor, reward_fn=low_bytes, max_resamples=-1)
    with pytest.raises(ConfigError, match=r"at most what the buffer holds \(4\), not 8"):
        verl.Trainer(actor, reward_fn=low_bytes, update_freq=8, buffer_size=4)
    with pytest.raises(ConfigError, match="micro_batch_size: must be at least 1"):
        verl.Actor(str(tiny), micro_batch_size=0)


def test_a_critic_that_is_not_used_is_told(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    critic = verl.Critic.from_pretrained(str(tiny))
    trainer = verl.Trainer(verl.Actor(str(tiny)), critic, reward_fn=low_bytes, algorithm="grpo", log_dir=False)
    assert trainer.critic is None and "algorithm 'grpo' has no critic" in caplog.text


def test_amp_trains(tiny: Path) -> None:
    trainer = make(tiny, "ppo", n=2, use_amp=True)
    assert trainer.step(PROMPTS)["grad_norm/actor"] > 0
    assert next(trainer.actor.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"buffer": 3, "reward_fn": low_bytes}, "buffer is 'memory', 'disk', 'distributed' or a Buffer, not 3"),
        ({"rewrd_fn": low_bytes}, "there is no keyword 'rewrd_fn': did you mean 'reward_fn'"),
        ({"reward_func": low_bytes}, "there is no keyword 'reward_func': did you mean 'reward_fn'"),
        ({"clip_rato": 0.1}, "algorithm 'grpo' has no option 'clip_rato': did you mean 'clip_ratio'"),
    ],
)
def test_keywords_that_are_none_are_named(tiny: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        verl.Trainer(verl.Actor(tiny), log_dir=False, **keywords)


def test_a_path_and_short_dtypes_are_taken(tiny: Path) -> None:
    actor = verl.Actor(tiny, dtype="bf16")
    assert next(actor.model.parameters()).dtype == torch.bfloat16


def test_the_learning_rate_is_a_keyword_of_an_actor(tiny: Path) -> None:
    assert verl.Actor(tiny, lr=1e-5, warmup_steps=3).train_options.optim == OptimConfig(lr=1e-5, warmup_steps=3)
    beside = verl.Actor(tiny, lr=1e-5, optim={"weight_decay": 0.1}, train={"optim": {"lr": 1.0}})
    assert beside.train_options.optim == OptimConfig(lr=1e-5, weight_decay=0.1)
    assert verl.Critic(tiny, lr=2e-5, train={"optim": {"schedule": "linear"}}).train_options.optim == OptimConfig(
        lr=2e-5, schedule="linear"
    )
    with pytest.raises(ConfigError, match="'lr' is given as a keyword and in optim="):
        verl.Actor(tiny, lr=1e-5, optim={"lr": 1e-4})
    with pytest.raises(ConfigError, match="'lr' is set in the optimizer that you gave"):
        verl.Actor(tiny, lr=1e-5, optim=torch.optim.SGD)
    with pytest.raises(ConfigError, match="lr: must be"):
        verl.Actor(tiny, lr=-1.0)
    with pytest.raises(ConfigError, match="Actor has no setting 'lrr': did you mean 'lr'"):
        verl.Actor(tiny, lrr=1e-5)


@pytest.mark.parametrize(
    ("option", "where"),
    [
        ("lr", "Actor(MODEL, lr=...)"),
        ("learning_rate", "Actor(MODEL, lr=...)"),
        ("train_micro_batch_size_per_gpu", "Actor(MODEL, train_micro_batch_size_per_gpu=...)"),
        ("total_steps", "fit(steps=...)"),
        ("steps", "fit(steps=...)"),
        ("prompts", "fit(prompts=...)"),
        ("max_prompt_length", "fit(max_prompt_length=...)"),
        ("max_staleness", "AsyncTrainer(ACTOR, max_staleness=...)"),
        ("retries", "Reward(FUNCTION, retries=...)"),
        ("eval_every", "HeldOut(ROWS, every=...)"),
    ],
)
def test_a_keyword_of_another_call_is_told_by_its_call(tiny: Path, option: str, where: str) -> None:
    tasks = [verl.Task(name, algorithm="grpo", sources={"reward": len}) for name in ("a", "b")]
    says = pytest.raises(ConfigError, match=re.escape(f"'{option}': it goes to {where}"))
    with says:
        verl.Trainer(verl.Actor(tiny), reward_fn=len, log_dir=False, **{option: 1})
    with says:
        verl.Trainer(verl.Actor(tiny), tasks=tasks, log_dir=False, **{option: 1})
    if "Reward" not in where:
        with says:
            verl.Reward(len, **{option: 1})
    if "Actor(" not in where and option != "total_steps":
        with says:
            verl.Critic(str(tiny), **{option: 1})


def test_an_option_of_algorithms_goes_to_the_trainer(tiny: Path) -> None:
    says = pytest.raises(ConfigError, match=re.escape("'clip_ratio': it goes to Trainer(ACTOR, clip_ratio=...)"))
    for call in (verl.Actor, verl.Critic):
        with says:
            call(str(tiny), clip_ratio=0.1)
    with pytest.raises(ConfigError, match="algorithm 'grpo' has no option 'lam'"):
        verl.Trainer(verl.Actor(tiny), reward_fn=len, log_dir=False, lam=0.9)


def test_one_placement_is_given() -> None:
    assert by_workers(None, None) is None
    assert by_workers(2, None) == {"rollout": 2, "actor": 1}
    assert by_workers(None, 2) == {"actor": 2}
    with pytest.raises(ConfigError, match="give the trainer one placement"):
        lay_out([], ("cpu:0", None, by_workers(1, 1)), None, None)


def test_metrics_of_an_evaluation_by_name_as_a_list_or_alone(tiny: Path) -> None:
    def half(samples: verl.Batch) -> float:
        return 0.5

    def size(samples: verl.Batch) -> list[int]:
        return [len(text) for text in samples["response"]]

    actor = verl.Actor(tiny, sampling={"max_new_tokens": 2})
    trainer = verl.PPOTrainer(actor=actor, reward_fn=lambda texts: [0.0] * len(texts), log_dir=False)
    named = trainer.evaluate(["a", "b"], {"half": half, "size": size}).metrics
    assert trainer.evaluate(["a", "b"], metrics=[half, size]).metrics == named and named["half"] == 0.5
    assert trainer.evaluate(["a", "b"], metrics=half).metrics["half"] == 0.5
    with pytest.raises(ConfigError, match="two metrics have one name"):
        trainer.evaluate(["a"], metrics=[half, half])
    with pytest.raises(ConfigError, match="metric 'int' is a int"):
        trainer.evaluate(["a"], metrics=[3])  # type: ignore[list-item]
    with pytest.raises(DataError, match="the evaluation set has no problems"):
        trainer.evaluate(trainer.actor.prompts(["a"]).slice(0, 0))
