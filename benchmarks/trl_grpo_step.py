"""Time one GRPO step of TRL's `GRPOTrainer` on the shared workload; prints one line of JSON.

    PYTHON=$(benchmarks/peer_env.sh trl | tail -1)
    $PYTHON benchmarks/trl_grpo_step.py --dtype bf16 --micro-batch 16 --steps 3

Settings, each the fastest that TRL offers on a CPU: SDPA attention, no gradient checkpointing (TRL's
default is on), no reference model (`beta` 0, the default), the fused AdamW that is the default, all 32
completions generated as one batch with a key-value cache, and old log-probs not recomputed, as the
generation is aligned with the optimizer step. End of sequence is suppressed (`min_new_tokens`), so every
completion has its full length.

`--dtype bf16` keeps weights, gradients and AdamW's moments in bf16. TRL's own `bf16=True`, which is its
default, wraps the forward in autocast besides; `--autocast` turns that on. With `--dtype fp32 --autocast`
one gets mixed precision on fp32 weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import trl
import workload
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


class StepClock(TrainerCallback):
    """Wall time from the beginning of each optimizer step to its end, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock, before the step's completions are generated."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it, after the optimizer's step."""
        self.seconds.append(time.perf_counter() - self._start)


class TimedTrainer(trl.GRPOTrainer):
    """TRL's trainer, which also notes the wall time of each call that generates, in seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generation_seconds: list[float] = []

    def _generate(self, prompts: list[str]) -> Any:
        start = time.perf_counter()
        generated = super()._generate(prompts)
        self.generation_seconds.append(time.perf_counter() - start)
        return generated


def rewards(completions: list[str], **_: Any) -> list[float]:
    """The workload's reward in the form that TRL calls."""
    return [workload.reward(completion) for completion in completions]


def make_trainer(args: argparse.Namespace, output: str, clock: StepClock) -> TimedTrainer:
    """A trainer that takes one warm-up step and `args.steps` timed ones."""
    completions = args.prompts * args.samples
    config = trl.GRPOConfig(
        output_dir=output,
        max_steps=1 + args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=completions // args.micro_batch,
        generation_batch_size=completions,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        model_init_kwargs={
            "dtype": "bfloat16" if args.dtype == "bf16" else "float32",
            "attn_implementation": "sdpa",
        },
        bf16=args.autocast,
        use_cpu=args.device == "cpu",
        gradient_checkpointing=False,
        dataloader_pin_memory=args.device != "cpu",
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return TimedTrainer(
        model=args.model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": workload.prompts(tokenizer, args.prompts)}),
        callbacks=[clock],
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps and return medians over the timed ones, the peak memory, and the settings."""
    torch.set_num_threads(args.threads)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(args, output, clock)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/min_length" in entry]
    if any(entry["completions/min_length"] != args.new_tokens for entry in logs) or not logs:
        raise SystemExit(f"completions are not {args.new_tokens} tokens long: this is not the agreed work")
    steps, generation = clock.seconds[1:], trainer.generation_seconds[1:]
    if not len(steps) == len(generation) == args.steps:
        raise SystemExit(f"{len(steps)} steps, {len(generation)} generations: one of each was expected a step")
    training = [step - generate for step, generate in zip(steps, generation, strict=True)]
    return {
        "name": "trl",
        "version": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "autocast": args.autocast,
        "weights": str(trainer.model.dtype),
        "micro_batch": args.micro_batch,
        "device": args.device,
        "threads": args.threads,
        "completions": args.prompts * args.samples,
        "new_tokens": args.new_tokens,
        "steps": args.steps,
        "step_seconds": round(statistics.median(steps), 3),
        "generation_seconds": round(statistics.median(generation), 3),
        "training_seconds": round(statistics.median(training), 3),
        "all_step_seconds": [round(step, 3) for step in steps],
        "mean_reward": round(statistics.mean(entry["reward"] for entry in logs), 3),
        "peak_memory_gb": round(workload.peak_memory_gb(args.device), 3),
    }


def main() -> None:
    """Measure, with everything that TRL prints sent to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--autocast", action="store_true", help="TRL's bf16=True: autocast around the forward")
    parser.add_argument("--micro-batch", type=int, choices=[1, 2, 4, 8, 16, 32], default=16)
    workload.add_arguments(parser)
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
