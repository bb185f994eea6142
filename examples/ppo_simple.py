"""PPO as a plain loop over calls; the same script in one process and on several ranks.

    python examples/ppo_simple.py --actor_model gpt2 --critic_model gpt2
    torchrun --nproc_per_node=2 examples/ppo_simple.py
    torchrun --nproc_per_node=2 examples/ppo_simple.py --config-path configs/ppo_llama3.yaml \\
        --num-rollout-workers 1 --num-update-workers 1

In the second line both ranks do everything, each a part of it; in the third, rank 0 rolls out and rank 1 updates. The
loop's reward counts the letter "e", so a few steps on a laptop show it rise. With a recipe everything is as the recipe
says, as in `verl train`: data, reward, algorithm, evaluation, checkpoints; options and KEY=VALUE change its settings.
Options take dashes or underscores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verl
from verl.config import load_config

#: Option -> the recipe's settings that it changes, and its value without a recipe.
OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "actor_model": (("actor_rollout_ref.model.path",), "gpt2"),
    "critic_model": (("critic.model.path",), None),
    "steps": (("trainer.total_steps",), 10),
    "batch_size": (("data.batch_size",), 16),
    "max_new_tokens": (("actor_rollout_ref.rollout.max_new_tokens",), 16),
    "lr": (("actor_rollout_ref.actor.optim.lr", "critic.optim.lr"), 1e-5),
}


def letter_e(responses: list[str]) -> list[float]:
    """The share of the letter "e" among the letters of each response."""
    return [text.lower().count("e") / max(sum(c.isalpha() for c in text), 1) for text in responses]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO as a plain loop over calls, or by a recipe.")
    option = parser.add_argument
    option("--config_path", type=Path, help="a recipe, in which the options below change settings")
    option("--actor_model", help="name or directory of the policy (default: gpt2)")
    option("--critic_model", help="of the value model (default: the actor's)")
    option("--steps", type=int, help="training steps (default: 10)")
    option("--batch_size", type=int, help="samples a step, of a recipe: prompts (default: 16)")
    option("--max_new_tokens", type=int, help="length of a response (default: 16)")
    option("--lr", type=float, help="learning rate of both models (default: 1e-5)")
    option("--num_rollout_workers", type=int, help="ranks that only generate (default: those that train do)")
    option("--num_update_workers", type=int, default=1, help="beside them: ranks that train (default: %(default)s)")
    option("overrides", nargs="*", metavar="KEY=VALUE", help="settings that replace the recipe's")
    return parser.parse_intermixed_args([_underscored(word) for word in (sys.argv[1:] if argv is None else argv)])


def _underscored(word: str) -> str:
    """--num-rollout-workers=2 as --num_rollout_workers=2."""
    if not word.startswith("--"):
        return word
    name, sign, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{sign}{value}"


def train_recipe(args: argparse.Namespace, placement: dict[str, int] | None) -> None:
    """What `verl train` does, with the options in the place of the recipe's settings."""
    from verl.run.train import train

    file = args.config_path if args.config_path.exists() else Path(__file__).parent / args.config_path
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    changes = [f"{key}={value}" for name, value in options.items() for key in OPTIONS[name][0]]
    changes += [f"trainer.placement.{role}={count}" for role, count in (placement or {}).items()]
    train(load_config(file, [*changes, *args.overrides]))


def train_loop(args: argparse.Namespace, placement: dict[str, int] | None) -> list[float]:
    """The loop of the articles; returns the mean reward of each step."""
    for name, (_, usual) in OPTIONS.items():
        setattr(args, name, usual if getattr(args, name) is None else getattr(args, name))
    options = {"optim": {"lr": args.lr}, "placement": placement}
    actor = verl.Actor.from_pretrained(args.actor_model, algorithm="ppo", **options)
    critic = verl.Critic.from_pretrained(args.critic_model or args.actor_model, **options)
    reward_model = verl.Reward(reward_fn=letter_e)
    prompts = ["Once upon a time"] * args.batch_size
    print(actor.controller.mesh)
    history = []
    for step in range(args.steps):
        sequences = actor.generate_sequences(prompts, max_new_tokens=args.max_new_tokens)
        rewards = reward_model.get_reward(sequences)
        values = critic.compute_values(sequences)
        policy = actor.update(sequences, rewards, values)
        value = critic.update(sequences.add(values), rewards)
        history.append(sum(rewards["reward"]) / len(rewards))
        losses = f"loss/actor {policy['loss']:+.4f}  loss/critic {value['loss']:.4f}"
        print(f"step {step}  reward {history[-1]:.4f}  kl {policy['policy/kl']:.4f}  {losses}")
    return history


def main(argv: Sequence[str] | None = None) -> list[float] | None:
    args = parse(argv)
    placement = None
    if args.num_rollout_workers is not None:
        placement = {"rollout": args.num_rollout_workers, "actor": args.num_update_workers}
    return train_loop(args, placement) if args.config_path is None else train_recipe(args, placement)


if __name__ == "__main__":
    main()
