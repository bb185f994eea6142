"""GRPO trains the agent of assistant.py, as it is, to use its tool.

pip install '.[gateway]' openai
python examples/agent/train.py
python examples/agent/train.py --control    # rewards shuffled within the step: must not learn
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import verl
from verl.batch import Batch
from verl.data.prompts import PromptDataset
from verl.trainer.evaluation import HeldOut, paired_bootstrap

sys.path.insert(0, str(Path(__file__).parent))
from assistant import assistant


def questions(count: int, seed: str, held_out: bool = False) -> list[dict[str, Any]]:
    """Sums of two numbers from 10 to 99; those whose difference is a multiple of 5 are held out."""
    draw, rows = random.Random(seed), list[dict[str, Any]]()
    while len(rows) < count:
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        if ((a - b) % 5 == 0) == held_out:
            rows.append({"prompt": f"What is {a} + {b}?", "answer": str(a + b)})
    return rows


def steps(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    for step in range(args.steps):
        yield questions(args.questions, f"{args.seed}, {step}")


def solved(samples: Batch) -> list[float]:
    """1 where the answer is right, without the credit for a call."""
    return [float(reward == 1.0) for reward in samples["reward"]]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="GRPO on an agent.")
    option = parser.add_argument
    option("--model", default="models/SmolLM2-135M-Instruct", help="name or directory (default: %(default)s)")
    option("--steps", type=int, default=8, help="training steps (default: %(default)s)")
    option("--questions", type=int, default=12, help="of a step (default: %(default)s)")
    option("--held_out", type=int, default=48, help="questions of each evaluation (default: %(default)s)")
    option("--lr", type=float, default=1e-6, help="learning rate, reached with the last step (default: %(default)s)")
    option("--seed", type=int, default=0, help="of questions and samples (default: %(default)s)")
    option("--control", action="store_true", help="rewards shuffled within the step")
    option("--log_dir", help="where metrics and conversations go (default: nowhere)")
    args = parser.parse_args(argv)
    actor = verl.Actor.from_pretrained(
        args.model,
        episode=verl.Gateway(assistant, chat_template="hermes"),
        dtype="float32",  # bf16 weights do not show steps of 1e-6
        optim={"lr": args.lr, "warmup_steps": args.steps},
        sampling={"max_new_tokens": 40, "temperature": 0.8},
        seed=args.seed,
    )
    results: list[Any] = []

    def note(result: dict[str, Any], evaluation: Any) -> None:
        results.append(evaluation)
        print(f"step {result['step']}: {evaluation.metrics['solved']:.1%} of held-out questions solved", flush=True)

    rows = PromptDataset(Batch.from_rows(questions(args.held_out, "held out", held_out=True)))
    trainer = verl.Trainer(
        actor,
        algorithm="grpo",
        n=8,
        held_out=HeldOut(rows, temperature=0.8, metrics={"solved": solved}, on_result=note),
        permute_rewards=args.control,
        log_dir=args.log_dir or False,
    )
    trainer.fit(steps(args), args.steps)
    before, after = results[0], results[-1]
    gain = paired_bootstrap(before.by_problem("solved"), after.by_problem("solved"))
    print(f"gain {gain.value:+.3f}, 95 % interval {gain.low:+.3f} to {gain.high:+.3f}")
    return {"before": before.metrics["solved"], "gain": gain.value, "low": gain.low, "high": gain.high}


if __name__ == "__main__":
    main()
