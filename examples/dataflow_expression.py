"""A step written as an expression of collectives; lazy, and the same graph as the trainer's.

    python examples/dataflow_expression.py --model gpt2 --algorithm ppo

The reward counts the letter "e", so a few steps on a laptop show it rise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import verl
from verl.dataflow import advantages, experience, prompts, responses, updates


def letter_e(texts: list[str]) -> list[float]:
    return [text.lower().count("e") / max(len(text), 1) for text in texts]


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description="A training step as an expression.")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(argv)
    sampling = verl.SamplingParams(max_new_tokens=16)
    actor = verl.Actor.from_pretrained(args.model, algorithm=args.algorithm, optim={"lr": args.lr}, sampling=sampling)

    controller = verl.Controller()
    rollout_group = verl.WorkerGroup(actor, verl.Reward(letter_e))
    update_group = verl.WorkerGroup(actor)
    flow = (
        controller.broadcast(prompts)
        .scatter(responses, worker_group=rollout_group)
        .gather(experience)
        .all_reduce(advantages)
        .scatter(updates, worker_group=update_group)
        .sync()
    )
    print(flow.graph)
    prompt_batch = ["Once upon a time", "In the beginning"]
    return [flow.run(prompt_batch) for _ in range(args.steps)]


if __name__ == "__main__":
    for step, metrics in enumerate(main()):
        print(f"step {step}  reward {metrics['reward']:.4f}  loss/actor {metrics['loss/actor']:+.4f}")
