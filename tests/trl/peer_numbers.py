"""Trains tiny models by TRL's names and prints what they log: `peer_numbers.py PACKAGE MODELS`.

The same script with either package: PACKAGE is `trl`, or `verl.trl`. MODELS is a folder with the directories `lm` and
`score`. GRPO's completions are recorded ones. The last line is JSON: case -> [{entry: number} of each step].
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 5
COMMON: dict[str, Any] = {
    "learning_rate": 3e-3, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5, "disable_tqdm": True,
}  # fmt: skip
#: Of one micro-batch a step: what TRL computes for each micro-batch alone is then of the step.
WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
GRPO = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "shuffle_dataset": False,
        "vllm_importance_sampling_correction": False}  # fmt: skip
RLOO = {key: value for key, value in GRPO.items() if not key.startswith("vllm")}
TWICE = {"num_iterations": 2, "max_steps": 6}
FAR = {"max_steps": 4, "learning_rate": 3.0, "warmup_steps": 0, "max_grad_norm": 0.0, "optim": "sgd", "beta": 0.1}

WORDS = ["red", "blue", "a long green", "grey", "dark violet and so on", "white", "pink", "black", "teal", "gold"]
ASK = [f"Name colour {i} of {3 * i + 1}: " for i in range(10)]
TURNS = [{"prompt": ask, "completion": word} for ask, word in zip(ASK, WORDS, strict=True)]
TEXTS = [{"text": ask + word} for ask, word in zip(ASK, WORDS, strict=True)]
LABELS = [{**row, "label": i % 3 != 1} for i, row in enumerate(TURNS)]
PAIRS = [
    {"prompt": ask, "chosen": word, "rejected": other + "!"}
    for ask, word, other in zip(ASK, WORDS, reversed(WORDS), strict=True)
]
PROMPTS = [{"prompt": ask, "wish": i % 4} for i, ask in enumerate(ASK)]


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


CHATS = [{"messages": said("user", row["prompt"]) + said("assistant", row["completion"])} for row in TURNS]
CHAT_TURNS = [
    {"prompt": said("user", row["prompt"]), "completion": said("assistant", row["completion"])} for row in TURNS
]
CHAT_PAIRS = [
    {"prompt": said("user", row["prompt"]), **{k: said("assistant", row[k]) for k in ("chosen", "rejected")}}
    for row in PAIRS
]
CHAT_LABELS = [{**row, "label": i % 3 != 1} for i, row in enumerate(CHAT_TURNS)]
SMOOTHED = {"exo_pair": 0.1, "robust": 0.1, "aot": 0.1}
PAIR_LOSSES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop",
)  # fmt: skip
#: Losses that TRL computes of each micro-batch alone.
BY_MICRO_BATCH = ("aot", "sft")

#: Case -> trainer, its data, and further arguments.
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "sft": ("SFT", TURNS, {}),
    "sft whole": ("SFT", TURNS, {"completion_only_loss": False}),
    "sft text": ("SFT", TEXTS, {}),
    "sft chat": ("SFT", CHATS, {}),
    "sft chat turns": ("SFT", CHAT_TURNS, {}),
    "sft cut": ("SFT", TURNS, {"max_length": 30}),
    "sft dft": ("SFT", TURNS, {"loss_type": "dft"}),
    "sft cosine": ("SFT", TURNS, {"lr_scheduler_type": "cosine", "warmup_steps": 0.3, "seed": 7}),
    "sft in order": ("SFT", TURNS, {"train_sampling_strategy": "sequential", "data_seed": 3}),
    **{f"dpo {name}": ("DPO", PAIRS, {"loss_type": name, "label_smoothing": SMOOTHED.get(name, 0.0)})
       for name in PAIR_LOSSES},
    **{f"dpo {name}": ("DPO", PAIRS[:8], {**WHOLE, "loss_type": name, "label_smoothing": SMOOTHED.get(name, 0.0)})
       for name in BY_MICRO_BATCH},
    "dpo end": ("DPO", PAIRS, {"max_length": 28, "truncation_mode": "keep_end"}),
    "sft end": ("SFT", TEXTS, {"max_length": 20, "truncation_mode": "keep_end"}),
    "dpo chat": ("DPO", CHAT_PAIRS, {"beta": 0.3}),
    "dpo cut": ("DPO", PAIRS, {"max_length": 28}),
    "kto": ("KTO", LABELS, {"desirable_weight": 1.3, "undesirable_weight": 0.7, "beta": 0.5}),
    "kto whole": ("KTO", LABELS, {**WHOLE, "beta": 0.5}),
    "kto chat": ("KTO", CHAT_LABELS, {}),
    "kto pairs": ("KTO", PAIRS, {}),
    "kto apo_zero_unpaired": ("KTO", LABELS, {"loss_type": "apo_zero_unpaired", "beta": 0.5}),
    "reward": ("Reward", PAIRS, {}),
    "reward centred": ("Reward", PAIRS, {"center_rewards_coefficient": 0.1}),
    "reward chat": ("Reward", CHAT_PAIRS, {}),
    "reward cut": ("Reward", PAIRS, {"max_length": 32}),
    **{f"grpo {name}": ("GRPO", PROMPTS, {**GRPO, "loss_type": name})
       for name in ("grpo", "dapo", "dr_grpo")},
    **{f"grpo {name} kl twice": ("GRPO", PROMPTS, {**GRPO, "loss_type": name, "beta": 0.1, **TWICE})
       for name in ("grpo", "dapo", "dr_grpo")},
    "grpo luspo": ("GRPO", PROMPTS, {**GRPO, **TWICE, "loss_type": "luspo", "importance_sampling_level": "sequence"}),
    "grpo luspo tokens": ("GRPO", PROMPTS, {**GRPO, "loss_type": "luspo", "beta": 0.1}),
    "grpo sgd": ("GRPO", PROMPTS, {**GRPO, "optim": "sgd", "max_grad_norm": 0.0}),
    "sft adafactor": ("SFT", TURNS, {"optim": "adafactor", "lr_scheduler_type": "polynomial"}),
    "grpo bnpo": ("GRPO", PROMPTS, {**GRPO, **WHOLE, "loss_type": "bnpo", "beta": 0.1}),
    "grpo cispo": ("GRPO", PROMPTS, {**GRPO, "loss_type": "cispo", "epsilon_high": 1.02, **TWICE}),
    "grpo unscaled": ("GRPO", PROMPTS, {**GRPO, "scale_rewards": "none"}),
    "grpo by batch": ("GRPO", PROMPTS, {**GRPO, "scale_rewards": "batch"}),
    "grpo clipped": ("GRPO", PROMPTS, {**GRPO, **TWICE, "epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.5}),
    "grpo sequence": ("GRPO", PROMPTS, {**GRPO, **TWICE, "importance_sampling_level": "sequence",
                                        "loss_type": "grpo", "epsilon": 0.01}),
    "grpo sequence tokens": ("GRPO", PROMPTS, {**GRPO, **TWICE, "importance_sampling_level": "sequence"}),
    "grpo sequence kl": ("GRPO", PROMPTS, {**GRPO, **TWICE, "loss_type": "grpo",
                                           "importance_sampling_level": "sequence", "beta": 0.1}),
    "grpo plain kl": ("GRPO", PROMPTS, {**GRPO, "beta": 0.1, "use_bias_correction_kl": False}),
    "grpo entropy": ("GRPO", PROMPTS, {**GRPO, **WHOLE, "entropy_coef": 0.05}),
    "grpo sapo": ("GRPO", PROMPTS, {**GRPO, **TWICE, "loss_type": "sapo", "beta": 0.1}),
    "grpo vespo": ("GRPO", PROMPTS, {**GRPO, **TWICE, "loss_type": "vespo"}),
    "rloo": ("RLOO", PROMPTS, RLOO),
    "rloo twice": ("RLOO", PROMPTS, {**RLOO, **TWICE, "epsilon": 0.01}),
    "rloo normalized": ("RLOO", PROMPTS, {**RLOO, "normalize_advantages": True, "beta": 0.0}),
    "grpo weights": ("GRPO", PROMPTS, {**GRPO, "reward_weights": [0.5, 2.0]}),
    "sft one": ("SFT", TURNS[:8], WHOLE),
    "dpo one": ("DPO", PAIRS[:8], WHOLE),
    "dpo ipo one": ("DPO", PAIRS[:8], {**WHOLE, "loss_type": "ipo"}),
    "reward one": ("Reward", PAIRS[:8], WHOLE),
    "rloo one": ("RLOO", PROMPTS, {**RLOO, **WHOLE}),
    "rloo clipped one": ("RLOO", PROMPTS, {**RLOO, **WHOLE, **TWICE, "epsilon": 0.01}),
    "grpo clipped one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, **TWICE, "epsilon": 0.01, "epsilon_high": 0.02,
                                           "beta": 0.1}),
    "grpo sequence one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, **TWICE, "importance_sampling_level": "sequence",
                                            "loss_type": "grpo", "epsilon": 0.001, "beta": 0.1}),
    # The policy is nats away from its reference.
    "grpo far one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, **TWICE, **FAR}),
    "grpo far plain kl one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, **TWICE, **FAR, "use_bias_correction_kl": False}),
    "rloo far one": ("RLOO", PROMPTS, {**RLOO, **WHOLE, **FAR}),
    "grpo cispo one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, **TWICE, "loss_type": "cispo", "epsilon_high": 1.02}),
    "grpo sapo one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, "loss_type": "sapo", "beta": 0.1}),
    "grpo vespo one": ("GRPO", PROMPTS, {**GRPO, **WHOLE, **TWICE, "loss_type": "vespo"}),
}  # fmt: skip


def completion_of(tokens: list[int], number: int) -> list[int]:
    """The recorded completion `number` to a prompt: a few tokens, and the end unless it is a long one."""
    length = 3 + (sum(tokens) + 5 * number) % 9
    return [7 + (3 * sum(tokens) + 11 * number + 5 * i) % 90 for i in range(length)] + ([] if number == 3 else [0])


def short(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


def wished(completions: list[str], wish: list[int], **columns: Any) -> list[float | None]:
    return [
        None if len(text) == 5 else float(len(text) % 4 == want) for text, want in zip(completions, wish, strict=True)
    ]


def recorded(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """TRL's `rollout_func`."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    group = trainer.args.num_generations
    ids = [completion_of(tokens, row % group) for row, tokens in enumerate(prompt_ids)]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[0.0] * len(tokens) for tokens in ids]}


class Recorded:
    """A rollout engine of ours that gives the recorded completions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.policy_version = 0
        self._samples: list[Any] = []
        self._asked: dict[tuple[int, ...], int] = {}

    @property
    def unfinished(self) -> int:
        return len(self._samples)

    def add(self, request: Any) -> None:
        from verl.rollout.base import Sample

        prompt = tuple(request.prompt_tokens)
        number = self._asked.get(prompt, 0)
        self._asked[prompt] = number + 1
        tokens = completion_of(list(prompt), number % GRPO["num_generations"])
        finish = "stop" if tokens[-1] == 0 else "length"
        self._samples.append(Sample(request.id, tokens, [0.0] * len(tokens), finish, self.policy_version))

    def step(self) -> list[Any]:
        samples, self._samples = self._samples, []
        return samples

    def abort(self, ids: Any) -> None:
        self._samples = [sample for sample in self._samples if sample.id not in set(ids)]

    def load_shards(self, shards: Any, version: int) -> None:
        for _ in shards:
            pass
        self.policy_version = version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def run(package: str, models: Path, kind: str, rows: list[Any], settings: dict[str, Any]) -> list[dict[str, float]]:
    names, ours = importlib.import_module(package), package != "trl"
    args = getattr(names, f"{kind}Config")(tempfile.mkdtemp(), **COMMON | settings)
    if not ours:
        from datasets import Dataset

        rows = Dataset.from_list(rows)
    more: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        more = {"reward_funcs": [short, wished] if args.reward_weights else short}
        more |= {"rollout": Recorded} if ours else {"rollout_func": recorded} if kind == "GRPO" else {}
    model = str(models / ("score" if kind == "Reward" else "lm"))
    trainer = getattr(names, f"{kind}Trainer")(model, args=args, train_dataset=rows, **more)
    if kind == "RLOO" and not ours:  # it has no `rollout_func`
        trainer._generate_single_turn = lambda prompts, *rest: [
            completion_of(list(tokens), row % args.num_generations) for row, tokens in enumerate(prompts)
        ]
    trainer.train()
    return [
        {name: value for name, value in entry.items() if isinstance(value, int | float)}
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]


def main(package: str, models: str, *wanted: str) -> None:
    results: dict[str, Any] = {}
    for name, (kind, rows, settings) in CASES.items():
        if wanted and not name.startswith(wanted):
            continue
        try:
            results[name] = run(package, Path(models), kind, rows, settings)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
