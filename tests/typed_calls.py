"""Calls that mypy accepts and refuses. It reads this file with the package: a wrong call that it let pass would leave a
`type: ignore` unused, which is an error. Nothing here runs."""

from __future__ import annotations

import verl
from verl.algorithms.baselines import GRPO
from verl.batch import Batch
from verl.cluster.group import RankGroup
from verl.cluster.rank_context import dispatch
from verl.roles.handle import ModelHandle
from verl.workers.actor import ActorWorker, ReferenceWorker
from verl.workers.critic import CriticWorker
from verl.workers.trained import TrainedWorker
from verl.workers.update import MiniBatchPlan, TaskLoss


class Mine(ActorWorker):
    @dispatch("train")
    def more(self, rows: Batch, *, factor: float) -> list[float]:
        return [factor * len(rows)]


def calls(actor: verl.Actor, critic: verl.Critic, mine: RankGroup[Mine], rows: Batch) -> None:
    part = TaskLoss(rows, GRPO().objective("actor"))
    metrics: dict[str, float] = actor.group.call(ActorWorker.update, [part], MiniBatchPlan())
    actor.group.call(ActorWorker.update, [part])  # type: ignore[call-arg]
    actor.group.call(ActorWorker.update, rows, MiniBatchPlan())  # type: ignore[arg-type]
    actor.group.call(ActorWorker.update, [part], plan=MiniBatchPlan())
    actor.group.call(ActorWorker.update, [part], plans=MiniBatchPlan())  # type: ignore[call-arg]
    count: int = actor.group.call(ActorWorker.update, [part], MiniBatchPlan())  # type: ignore[assignment]
    finished: list[int] = [len(group) for group in actor.group.call(ActorWorker.generate, rows, actor.sampling)]
    actor.group.call(CriticWorker.values, rows)  # type: ignore[arg-type]
    actor.group.call(ReferenceWorker.log_probs, rows)  # type: ignore[arg-type]
    actor.group.call("update", [part], MiniBatchPlan())  # type: ignore[arg-type]
    critic.group.call(CriticWorker.values, [rows])  # type: ignore[arg-type]
    critic.group.call(TrainedWorker.saved, wait=False)
    handles: list[ModelHandle[TrainedWorker]] = [actor, critic]
    handles[0].group.call(TrainedWorker.saved, wait="yes")  # type: ignore[arg-type]
    numbers: list[float] = mine.call(Mine.more, rows, factor=2.0)
    mine.call(Mine.more, rows, factor="2")  # type: ignore[arg-type]
    mine.call(ActorWorker.sync)
    verl.WorkerGroup(actor).call(ActorWorker.loss, rows)  # type: ignore[arg-type]


def handles() -> None:
    verl.Actor("x", not_a_setting=1)  # type: ignore[call-arg]
    verl.Actor("x", lr="fast")  # type: ignore[arg-type]
    verl.Actor("x", lr=1e-5, lora={"r": 8}, stop=".", gradient_checkpointing=True, optim={"weight_decay": 0.1})
    verl.Critic("x", lr=1e-5, train={"epochs": 2}, dtype="bf16")
    verl.Critic("x", max_new_tokens=3)  # type: ignore[call-arg]
    actor: verl.Actor = verl.Actor.from_pretrained("x", lr=1e-5, algorithm="ppo")
    verl.Actor.from_pretrained("x", learning_rate=1e-5)  # type: ignore[call-arg]
    critic: verl.Critic = verl.Critic.from_pretrained("x", tokenizer="y", epochs=2)
    verl.Critic.from_pretrained("x", epoch=2)  # type: ignore[call-arg]
    engine: verl.VLLMActor = verl.VLLMActor.from_pretrained("x", tensor_parallel_size=2)
    verl.VLLMActor("x", tensor_parallel=2)  # type: ignore[call-arg]
    verl.FSDPWorker(model_name="x", fsdp_config={"sharding_strategy": "FULL_SHARD"}, optim_config={"lr": 1e-5})
    verl.FSDPWorker("x", fsdp={})  # type: ignore[call-arg]
    verl.FSDPWorker.from_pretrained("x", optim_config={"lr": 1e-5}, use_amp=True)
    verl.MegatronWorker("x", megatron_config={"tensor_model_parallel_size": 2}, train={"epochs": 2}, seed=1)
    verl.MegatronWorker("x", megatron=1)  # type: ignore[call-arg]
    verl.ActorRolloutRefWorker(model_path="x", max_batch_size=4, rollout_backend="hf", top_p=0.9)


def trainers(actor: verl.Actor) -> None:
    verl.Trainer(actor, reward_fn=len, algorithm="grpo", n=8, kl_coef=0.01, save_every=10, checkpoint_dir="x")
    verl.PPOTrainer(actor=actor, reward_fn=len, update_freq=64, buffer="disk", buffer_size=128, use_amp=False)
    verl.AsyncTrainer(actor, reward=len, batch_size=8, max_staleness=1, log_dir=False, algorithm="grpo")
    verl.Trainer(actor, reward_fn=len, save_evry=10)  # type: ignore[call-arg]
    verl.Trainer(actor, reward_fn=len, save_every="often")  # type: ignore[arg-type]
    verl.PPOTrainer(actor, reward_fn=len, batch_size=8)  # type: ignore[call-arg]
    verl.AsyncTrainer(actor, reward=len, max_staleness=1)  # type: ignore[call-arg]
    verl.InterleavedTrainer(actor, max_stalenes=1)  # type: ignore[call-arg]
