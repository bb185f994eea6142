"""For each setting two values, and an observer that sees on some input how they differ in what the setting states that
it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.config.observed import (
    Observer,
    again,
    costs,
    data,
    engine_samples,
    engine_updates,
    rewards,
    run,
    samples,
    two_ranks,
    updates,
    worker_samples,
)
from verl.training.options import OptimConfig
from verl.workers.actor import make_rollout_engine

#: Inputs that are tried at most.
TRIES = 200


#: How near the numbers are of what computes in fp32 alone: a rounding of fp32. Others have 1e-8: in fp64, too, AdamW
#: makes rounding larger where a gradient is near 0.
FP32 = 1e-4


@dataclass(frozen=True)
class Shown:
    """Two values of a setting, and an observer that sees their difference.

    Attributes:
        beside: settings beside which it is seen.
        needs: settings without which the setting is refused.
        count: for one of the cost, the function whose calls differ in number; "": any file.
        slow: more than about a second, or shown of another section, too.
        along: settings that the other value changes, too, to be possible at all.
        within: how near the numbers of a setting of the cost are.
    """

    observer: Observer
    one: Any
    other: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    count: str = ""
    slow: bool = False
    within: float = 1e-8
    along: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tries(self) -> int:
        """Inputs that are tried, one after the other, until the two values differ."""
        if self.observer in (again, data, run):  # of files, which are as they are
            return 1
        return 3 if self.observer in (two_ranks(samples), two_ranks(updates)) else TRIES  # a job takes seconds

    def under(self, section: str, beside: Mapping[str, Any]) -> Shown:
        """The same in a section: keys that begin with a dot are of it."""

        def keys(settings: Mapping[str, Any]) -> dict[str, Any]:
            return {f"{section}{key}" if key.startswith(".") else key: value for key, value in settings.items()}

        return replace(self, beside={**beside, **keys(self.beside)}, needs=keys(self.needs))


MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


BASE = {
    f"{MODEL}.path": "../tiny",
    # A step that is not the sign of a gradient: a rounding stays one.
    f"{ACTOR}.optim": {"lr": 1e-2, "adam_eps": 1e-2},
    f"{ROLLOUT}.n": 2,
    f"{ROLLOUT}.max_new_tokens": 6,
    "data.train": "../train.jsonl",
    "data.batch_size": 2,
    "reward.path": "../user.py:low",
    "trainer.total_steps": 2,
    "trainer.save_every": None,
    "trainer.run_name": "run",
    "trainer.loggers": [],
}


PAIRS = {
    "algorithm.name": "dpo", "data.train": "../pairs.jsonl", "reward.path": None, f"{ROLLOUT}.max_new_tokens": 128
}  # fmt: skip


KL = {"algorithm.kl_in": "loss", "algorithm.kl_coef": 0.1}


ASYNC = {"trainer.max_staleness": 0}


EXACT = {f"{MODEL}.path": "../exact"}


def sampling() -> dict[str, Shown]:
    letters = ["a", "e", "i", "o", "1", "2"]
    values = {
        "n": (2, 3), "max_new_tokens": (4, 9), "min_new_tokens": (0, 6), "temperature": (1.0, 0.3), "top_k": (0, 3),
        "top_p": (1.0, 0.2), "min_p": (0.0, 0.9), "stop": ([], letters),
    }  # fmt: skip
    long = {f"{ROLLOUT}.max_new_tokens": 150, "trainer.total_steps": 4}
    beside = {"min_new_tokens": {f"{ROLLOUT}.stop": letters}}
    shown = {name: Shown(samples, *pair, beside.get(name, {})) for name, pair in values.items()}
    shown |= {
        "url": Shown(samples, ["SERVER1"], ["SERVER2"]),
        "episode": Shown(samples, None, "../user.py:twice"),
        "environment": Shown(samples, None, "../user.py:Quiet"),
        "name": Shown(samples, "embedded", "hf", count="rollout/hf.py:step"),
        "max_num_seqs": Shown(samples, 256, 1, count="embedded/engine.py:step"),
        "kv_cache_gb": Shown(samples, None, 4e-4, count="embedded/engine.py:step"),
        "batch_invariant": Shown(samples, False, True, count="embedded/scheduler.py:split"),
        "tensor_model_parallel_size": Shown(two_ranks(samples), 1, 2, EXACT, count="distributed_c10d.py:", slow=True),
        "overlap_comm": Shown(
            two_ranks(samples),
            False,
            True,
            EXACT | {f"{ROLLOUT}.tensor_model_parallel_size": 2},
            count="weights/transition.py:ready",
            slow=True,
        ),
        "num_rollout_workers": Shown(run, 1, 2, {}, ASYNC, "ray/pool.py:_start", True),
        "max_rollout_workers": Shown(run, None, 2, long, ASYNC, "ray/pool.py:_start", True),
        "transport": Shown(run, "shared_memory", "queue", {}, ASYNC, "util/queue.py:get", True),
    }
    return {f"{ROLLOUT}.{name}": case for name, case in shown.items()}


def training(section: str, model: str, needs: Mapping[str, Any]) -> dict[str, Shown]:
    """Of the actor, and of the critic, which needs an algorithm that has one."""
    optim = {
        "lr": (1e-2, 2e-2), "betas": ([0.5, 0.9], [0.9, 0.999]), "adam_eps": (1e-6, 1e-1), "weight_decay": (0.0, 0.5),
        "max_grad_norm": (None, 1e-3), "warmup_steps": (0, 4), "schedule": ("constant", "cosine"),
    }  # fmt: skip
    shown = {f"{section}.optim.{name}": Shown(updates, *pair) for name, pair in optim.items()}
    forward = "training/forward.py:forward"
    ranks = two_ranks(updates)
    exact = {f"{model}.path": "../exact"}
    sizes = {"micro_batch_size": (None, 3), "max_tokens_per_micro_batch": (16384, 40)}
    shown |= {f"{section}.{name}": Shown(updates, *pair, count=forward) for name, pair in sizes.items()}
    layouts = {
        "strategy": ("ddp", "fsdp", "_fsdp_collectives.py:foreach_all_gather"),
        "tensor_parallel_size": (1, 2, "parallel/tensor.py:"),
        "pipeline_parallel_size": (1, 2, "parallel/pipeline.py:"),
        "ulysses_sequence_parallel_size": (1, 2, "parallel/sequence.py:"),
    }
    shown |= {
        f"{section}.{name}": Shown(ranks, one, other, exact, count=count, slow=True)
        for name, (one, other, count) in layouts.items()
    }
    shown |= {
        f"{section}.expert_parallel_size": Shown(
            ranks, 1, 2, {f"{model}.path": "../experts"}, count="parallel/expert.py:", slow=True
        ),
        f"{section}.optim.moments": Shown(updates, "bfloat16", "float32", needs={f"{model}.dtype": "bfloat16"}),
        f"{section}.optim.weight_decay_on": Shown(
            updates, "all", "matrices", needs={f"{section}.optim.weight_decay": 0.5}
        ),
        f"{section}.optim.warmup_ratio": Shown(updates, 0.0, 0.9, {"trainer.total_steps": 20}),
        f"{section}.optim.total_steps": Shown(updates, 4, 8, needs={f"{section}.optim.schedule": "linear"}),
        f"{section}.mini_batch_size": Shown(updates, None, 4, {"data.batch_size": 8}),
        f"{section}.epochs": Shown(updates, 1, 2),
        f"{section}.use_amp": Shown(updates, False, True, {f"{model}.path": "../llama"}),
        f"{section}.use_torch_compile": Shown(updates, False, True, count="models/packed.py:compile_layers", slow=True),
        f"{model}.path": Shown(updates, "../tiny", "../other"),
        f"{model}.tokenizer": Shown(run, "../tiny", "../tokenizer", slow=True),
        f"{model}.dtype": Shown(updates, "float64", "float32"),
        f"{model}.lora": Shown(updates, None, {"r": 2}),
        f"{model}.lora.r": Shown(updates, 2, 4),
        f"{model}.lora.alpha": Shown(updates, 4.0, 8.0, {f"{model}.lora.r": 2}, slow=True),
        f"{model}.lora.targets": Shown(updates, ["all-linear"], ["c_attn"], {f"{model}.lora.r": 2}, slow=True),
        f"{model}.max_position_embeddings": Shown(updates, None, 8),  # of a table that the files have otherwise
        f"{model}.trust_remote_code": Shown(updates, False, True, {f"{model}.path": "../coded"}),
        f"{model}.enable_gradient_checkpointing": Shown(updates, False, True, count="training/forward.py:_evaluated"),
        f"{model}.use_remove_padding": Shown(updates, True, False, count="models/packed.py:packed_hidden"),
        # Compiled layers are of fp32 and bf16: an fp64 model runs its own code.
        f"{model}.use_fused_kernels": Shown(
            updates, True, False, {f"{model}.path": "../wide"}, count="models/llama.py:hidden", within=FP32
        ),
        f"{model}.fused_kernel_options.impl_backend": Shown(
            updates, None, "other", {f"{model}.path": "../llama"}, count="models/packed.py:_warn_without"
        ),
    }
    slow = bool(needs)  # what is quick of the actor is so of the critic
    return {path: replace(case, needs={**case.needs, **needs}, slow=case.slow or slow) for path, case in shown.items()}


def sharding() -> dict[str, Shown]:
    """Of a model that two ranks share."""
    ranks = two_ranks(updates)
    fsdp, exact = {f"{ACTOR}.strategy": "fsdp"}, {f"{MODEL}.path": "../exact"}
    half = {f"{MODEL}.path": "../llama"}
    gathered = "_fsdp_collectives.py:foreach_all_gather"
    cases = {
        "fsdp_size": (-1, 1, gathered), "optimizer_offload": (False, True, "training/optimizer.py:move"),
        "param_offload": (False, True, "_fsdp_param_group.py:"),
        "reshard_after_forward": (True, False, gathered),
        "forward_prefetch": (False, True, "_fsdp_param_group.py:_prefetch_unshard"),
        "wrap_policy.transformer_layer_cls_to_wrap": (None, ["Qwen2MLP", "Qwen2Attention"], gathered),
        "wrap_policy_fn": (None, "../user.py:policy", gathered),
    }  # fmt: skip
    shown = {
        f"fsdp_config.{name}": Shown(ranks, one, other, exact, fsdp, count, True)
        for name, (one, other, count) in cases.items()
    }
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        shown[f"fsdp_config.mixed_precision.{name}"] = Shown(ranks, None, "bfloat16", half, fsdp, slow=True)
    # DeepSpeed trains no fp64.
    zero = {f"{ACTOR}.strategy": "deepspeed"}
    shown["deepspeed_config.zero_stage"] = Shown(ranks, 2, 3, half, zero, "zero/stage3.py:step", True, FP32)
    return {f"{ACTOR}.{name}": case for name, case in shown.items()}


def reference() -> dict[str, Shown]:
    return {
        "actor_rollout_ref.ref.path": Shown(run, "../tiny", "../other", needs=KL, slow=True),
        "actor_rollout_ref.ref.dtype": Shown(run, "float64", "float32", needs=KL, slow=True),
        "algorithm.name": Shown(updates, "grpo", "rloo"),
    }


def of_data() -> dict[str, Shown]:
    chat, cut = {"data.chat": True}, {"data.truncation": "left"}
    task = {"data.train": {"task": "chain_sum", "size": 12, "split": "train"}}
    shown = {
        "train": Shown(data, "../train.jsonl", "../eval.jsonl"),
        "eval": Shown(run, "../eval.jsonl", "../train2.jsonl", slow=True),
        "prompt_column": Shown(data, "prompt", "question"),
        "columns": Shown(data, {}, {"chosen": "rejected", "rejected": "chosen"}, needs=PAIRS),
        "prompt_template": Shown(data, None, "Q: {prompt}"),
        "system_prompt": Shown(data, None, "Be short.", chat),
        "chat": Shown(data, False, True),
        "chat_template_kwargs": Shown(data, {}, {"greeting": "Hi! "}, {**chat, f"{MODEL}.tokenizer": "../greeting"}),
        "batch_size": Shown(data, 2, 3),
        "shuffle": Shown(data, True, False),
        "max_prompt_length": Shown(data, None, 10, cut),
        "max_response_length": Shown(data, None, 3, needs=PAIRS),
        "truncation": Shown(data, "left", "right", {"data.max_prompt_length": 10}),
        "train.task": Shown(data, "chain_sum", "basic_arithmetic", task, slow=True),
        "train.size": Shown(data, 12, 5, task, slow=True),
        "train.seed": Shown(data, 0, 100, task, slow=True),
        "train.split": Shown(data, "train", "eval", task, slow=True),
        "train.holdout": Shown(data, 0.2, 0.6, task, slow=True),
    }
    return {f"data.{name}": case for name, case in (shown | pools()).items()}


def pools() -> dict[str, Shown]:
    """Of rewards that all count as solved, or as failed, in about three epochs."""
    long, rare = {"trainer.total_steps": 16}, {"data.pools.solved": 0.01}
    solved = {**long, "data.pools.solved_at": -1.0, "data.pools.failed_at": -2.0}
    failed = {**long, "data.pools.solved_at": 900.0, "data.pools.failed_at": 800.0}
    parts = {"a": {"path": "../user.py:low"}, "b": {"path": "../user.py:length"}}
    summed = {**long, "reward.path": None, "reward.components": parts, "data.pools.solved_at": 1.5}
    shown = {
        "solved": Shown(run, 0.01, 1.0, solved, slow=True),
        "failed": Shown(run, 0.01, 1.0, failed, slow=True),
        "decay": Shown(run, 0.0, 0.9, solved | rare, slow=True),
        "metric": Shown(run, "reward", "reward/a", summed | rare, slow=True),
        "solved_at": Shown(run, -1.0, 900.0, solved | rare, slow=True),
        "failed_at": Shown(run, -2.0, 800.0, failed | {"data.pools.failed": 0.01}, slow=True),
    }
    whole = Shown(run, None, {"solved": 0.01, "solved_at": -1.0, "failed_at": -2.0}, long, slow=True)
    return {"pools": whole, **{f"pools.{name}": case for name, case in shown.items()}}


def scoring() -> dict[str, Shown]:
    """Of a reward; of a cost, beside an algorithm that has one; of each of several."""
    problems = {".path": None, "data.train": {"task": "chain_sum", "size": 12}}
    judge = {".path": None, ".url": ["SERVER1"]}
    part = {
        "path": Shown(rewards, "../user.py:low", "../user.py:length"),
        "name": Shown(rewards, "task", "math", problems, slow=True),
        "model": Shown(rewards, "../scorer", "../scorer2", {".path": None}),
        "dtype": Shown(rewards, "float64", "float32", {".path": None}, {".model": "../scorer"}),
        "url": Shown(rewards, ["SERVER1/score"], ["SERVER1/nowhere"], {".path": None}),
        "template": Shown(rewards, "{response}", "{prompt} {response}", judge | {".scale": [0, 1000]}),
        "scale": Shown(rewards, None, [0, 1000], judge, {".template": "{response}"}),
        "answer": Shown(rewards, "whole", "tag", problems, {".name": "task"}, slow=True),
    }
    several = {"a": {"path": "../user.py:length"}}, {"b": {"path": "../user.py:low"}}
    failing = {"reward.path": "../user.py:some", "reward.max_failure_rate": 1.0, "reward.retries": 0}
    shown = {
        "reward.timeout": Shown(rewards, 30.0, 0.1, failing | {"reward.path": "../user.py:slow"}),
        "reward.retries": Shown(rewards, 0, 1, failing | {"reward.path": "../user.py:once"}),
        "reward.on_failure": Shown(rewards, "abstain", -1.0, failing),
        "reward.max_failure_rate": Shown(
            run, 0.5, 1.0, {"reward.path": "../user.py:even", "data.batch_size": 8, f"{ROLLOUT}.n": 8}, slow=True
        ),
        "reward.workers": Shown(rewards, 0, 1, count="ray/pool.py:_start", slow=True),
        "reward.max_workers": Shown(
            rewards,
            None,
            2,
            {"reward.path": "../user.py:slow"},
            {"reward.workers": 1},
            "ray/pool.py:_start",
            True,
        ),
        "reward.files": Shown(run, [], ["../no_such_file.txt"], slow=True),
        "reward.process": Shown(rewards, True, False, count="rewards/processes.py:"),
    }
    for section in ("reward", "cost"):
        shown[f"{section}.components"] = Shown(rewards, *several, {f"{section}.path": None})
        for name, case in part.items():
            shown[f"{section}.{name}"] = case.under(section, {})
        for name, case in {**part, "weight": Shown(rewards, 1.0, 2.0)}.items():
            beside = {f"{section}.path": None, f"{section}.components": several[0]}
            shown[f"{section}.components.*.{name}"] = replace(case.under(f"{section}.components.*", beside), slow=True)
    for path, case in shown.items():
        if path.startswith("cost"):
            needs = {**case.needs, "algorithm.name": "safe_rlhf"}
            shown[path] = replace(case, observer=costs, needs=needs, slow=True)
    return shown


def tasks() -> dict[str, Shown]:
    one = {"name": "a", "type": "grpo", "reward_model": "../user.py:low", "n": 2, "sampling": {"max_new_tokens": 6}}
    two = {"name": "b", "type": "grpo", "reward_model": "../user.py:length", "n": 2, "sampling": {"max_new_tokens": 6}}
    both = {
        "reward.path": None,
        "data.train": "../tasks.jsonl",
        "data.batch_size": 4,
        "tasks": [one, two],
        f"{ROLLOUT}.n": 8,
    }
    values: dict[str, tuple[Any, Any]] = {
        "type": ("grpo", "rloo"),
        "options": ({}, {"norm_adv_by_std": False}),
        "reward_model": ("../user.py:low", "../user.py:length"),
        "share": (1.0, 3.0),
        "loss_weight": (None, 5.0),
        "n": (2, 4),
        "sampling": ({"max_new_tokens": 6}, {"max_new_tokens": 3}),
    }
    shown = {f"tasks.*.{name}": Shown(run, *pair, both, slow=True) for name, pair in values.items()}
    guard = {"tasks.*.constraint_model": "../user.py:odd"}
    # From the sixth step on a task that has fallen is told from noise; the other, which has converged, gives way to it.
    scheduler = both | {
        "trainer.task_scheduler": {"initial_weights": {"a": 3.0, "b": 1.0}, "patience": 2},
        "trainer.total_steps": 9,
        "tasks": [one | {"reward_model": "../user.py:dropping"}, two | {"reward_model": "../user.py:same"}],
    }
    return shown | {
        "tasks": Shown(run, [one], [one | {"n": 4}], {**both, "data.train": {"a": "../train.jsonl"}}, slow=True),
        "tasks.*.name": Shown(run, "a", "c", both, along={"data.train": "../tasks2.jsonl"}, slow=True),
        "tasks.*.reward_config": Shown(
            run, {}, {"default_reward": -1.0}, {**both, "tasks.*.reward_model": "../user.py:even"}, slow=True
        ),
        "tasks.*.constraint_model": Shown(run, None, "../user.py:odd", both, slow=True),
        "tasks.*.constraint_config": Shown(run, {}, {"max_resamples": 1}, both, guard, slow=True),
        "trainer.task_scheduler": Shown(run, None, {"initial_weights": {"a": 3.0, "b": 1.0}}, needs=both, slow=True),
        "trainer.task_scheduler.initial_weights": Shown(
            run, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, scheduler, slow=True
        ),
        "trainer.task_scheduler.metric_key": Shown(run, "reward_score", "response/length", scheduler, slow=True),
        "trainer.task_scheduler.patience": Shown(run, 2, 20, scheduler, slow=True),
        "trainer.task_scheduler.min_weight": Shown(run, 0.1, 0.4, scheduler, slow=True),
    }


def trainer() -> dict[str, Shown]:
    held_out = {"data.eval": "../eval.jsonl"}
    overflow = {f"{MODEL}.path": "../llama", "algorithm.name": "dr_grpo"}
    falling = {"monitor_metrics": ["reward"], "threshold_delta": -0.15, "rollback_steps": 1, "window": 2, "baseline": 8}
    guarded = {"trainer.guards": [falling], "trainer.total_steps": 20, "trainer.save_every": 1,
               "trainer.keep_checkpoints": 20, "reward.path": "../user.py:falling"}  # fmt: skip
    guards: dict[str, tuple[Any, Any]] = {
        "monitor_metrics": (["reward"], ["response/length"]), "threshold_delta": (-0.15, -0.95),
        "rollback_steps": (1, 8), "absolute": (False, True), "window": (2, 12), "baseline": (2, 30),
        "max_rollbacks": (3, 0),
    }  # fmt: skip
    beside = {
        "absolute": {"trainer.guards.*.threshold_delta": -0.95}, "baseline": {"reward.path": "../user.py:sagging"}
    }  # fmt: skip
    shown = {
        f"guards.*.{name}": Shown(run, *pair, {**guarded, **beside.get(name, {})}, slow=True)
        for name, pair in guards.items()
    }
    shown |= {
        "guards": Shown(run, [], [falling], guarded, slow=True),
        "total_steps": Shown(run, 1, 2),
        "total_epochs": Shown(run, 1, 2, {"data.batch_size": 12, "trainer.total_steps": 100}, slow=True),
        "seed": Shown(run, 0, 1, slow=True),
        "project": Shown(run, "verl", "mine", needs={"trainer.loggers": ["trackio"]}, slow=True),
        "run_name": Shown(run, "run", "mine", slow=True),
        "output_dir": Shown(run, "runs", "mine", slow=True),
        "eval_every": Shown(run, None, 1, needs=held_out, slow=True),
        "eval_n": Shown(run, 1, 2, needs=held_out, slow=True),
        "eval_temperature": Shown(run, 0.0, 1.0, needs=held_out, slow=True),
        "eval_top_p": Shown(run, None, 0.1, {"trainer.eval_temperature": 1.0}, needs=held_out, slow=True),
        "eval_top_k": Shown(run, None, 1, {"trainer.eval_temperature": 1.0}, needs=held_out, slow=True),
        "eval_before": Shown(run, True, False, needs=held_out, slow=True),
        "eval_metrics": Shown(run, [], ["../user.py:halved"], needs=held_out, slow=True),
        "log_completions": Shown(run, 64, 2, needs=held_out, slow=True),
        "save_every": Shown(run, None, 1, slow=True),
        "keep_checkpoints": Shown(run, 2, 1, {"trainer.save_every": 1}, slow=True),
        "async_save": Shown(run, False, True, {"trainer.save_every": 1}, count="/threading.py:start", slow=True),
        "loggers": Shown(run, [], ["tensorboard"], slow=True),
        "resume": Shown(again, True, False, slow=True),
        "max_staleness": Shown(run, 0, 2, {"trainer.total_steps": 4}, slow=True),
        "timeline": Shown(run, False, True, slow=True),
        "control": Shown(run, None, "zero_lr", slow=True),
        "skip_zero_advantage_rows": Shown(
            run,
            True,
            False,
            {"reward.path": "../user.py:half", "data.batch_size": 8},
            count="training/micro_batch.py:_branches",
            slow=True,
        ),
        "max_resamples": Shown(run, 0, 4, {"reward.path": "../user.py:third"}, {"algorithm.name": "dapo"}, slow=True),
        "max_skipped_updates": Shown(
            run, 1, 2, {**overflow, "reward.path": "../user.py:infinite", "trainer.total_steps": 3}, slow=True
        ),
        "deadline": Shown(run, 1800.0, 1.0, {"reward.path": "../user.py:waiting"}, slow=True),
        "threads": Shown(run, 1, 2, count="threads", slow=True),
        "placement": Shown(
            run,
            None,
            {"actor": "cpu:0-1"},
            {f"{MODEL}.path": "../exact"},
            count="ray/transport.py:",
            slow=True,
        ),
    }
    return {f"trainer.{name}": case for name, case in shown.items()}


def plain_sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def hf_engine(packed: Any, tokenizer: Any, ends: tuple[int, ...], options: Any) -> Any:
    return make_rollout_engine(packed, tokenizer, ends, options.replace(name="hf"))


def of_engines() -> dict[str, Shown]:
    """What only Python sets: of training engines, of workers that sample, of one sample."""
    tiny, wide = engine_updates("../tiny"), engine_updates("../wide")
    optim = {".optim": OptimConfig(lr=1e-2, adam_eps=1e-2)}
    training = {
        "optim": Shown(tiny, OptimConfig(lr=1e-2), None),
        "optimizer": Shown(tiny, plain_sgd, torch.optim.Adam),
        "scheduler": Shown(tiny, None, halving, needs={".optimizer": plain_sgd}),
        "gradient_checkpointing": Shown(tiny, False, True, optim, count="training/forward.py:_evaluated"),
        "share_prompts": Shown(
            tiny, True, False, optim | {".max_tokens_per_micro_batch": 40}, count="training/forward.py:forward"
        ),
        "fused_kernels": Shown(wide, True, False, optim, count="models/llama.py:hidden", within=FP32),
        "remove_padding": Shown(tiny, True, False, optim, count="models/packed.py:packed_hidden"),
    }
    embedded, twice = {".name": "embedded"}, "../user.py:twice"
    sampling = {
        "name": Shown(worker_samples, "embedded", hf_engine, count="rollout/hf.py:step"),
        "episode": Shown(worker_samples, None, twice, embedded),
        "episodes": Shown(worker_samples, {"b": twice}, {"a": twice}, embedded),
        "seed": Shown(worker_samples, 0, 1, embedded),
    }
    some = range(4, 60)
    short, ends = {".max_new_tokens": 9}, {".max_new_tokens": 9, ".stop_token_ids": [*some]}
    values: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "max_new_tokens": (4, 9, {}), "min_new_tokens": (0, 6, ends), "temperature": (1.0, 0.3, short),
        "top_k": (0, 3, short), "top_p": (1.0, 0.2, short), "min_p": (0.0, 0.9, short),
        "stop": ([], ["a", "e", "i", "o", "1", "2"], short), "stop_token_ids": ([], [*some], short),
        "ignore_eos": (False, True, short),
    }  # fmt: skip
    drawn = {name: Shown(engine_samples, one, other, beside) for name, (one, other, beside) in values.items()}
    records = {"EngineOptions": training, "SamplerOptions": sampling, "SamplingParams": drawn}
    return {
        f"{record}.{name}": case.under(record, {}) for record, cases in records.items() for name, case in cases.items()
    }


#: By the path of the setting; what only Python sets by its record and its name.
SHOWN: dict[str, Shown] = {
    **sampling(), **training(ACTOR, MODEL, {}), **training("critic", "critic.model", {"algorithm.name": "ppo"}),
    **sharding(), **reference(), **of_data(), **scoring(), **tasks(), **trainer(), **of_engines(),
}  # fmt: skip
