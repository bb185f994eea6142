"""PPO as a plain loop over verbs; the same script in one process and on several ranks.

    python examples/ppo_simple.py --actor_model gpt2 --critic_model gpt2
    torchrun --nproc_per_node=2 examples/ppo_simple.py
    torchrun --nproc_per_node=2 examples/ppo_simple.py --config-path configs/ppo_llama3.yaml \\
        --num-rollout-workers 1 --num-update-workers 1

In the second line both ranks do everything, each a part of it; in the third, rank 0 rolls out and rank 1 updates. The
reward counts the letter "e", so a few steps on a laptop show it rise. Options take dashes or underscores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import verl
from verl.config import load_config


def letter_e(responses: list[str]) -> list[float]:
    """The share of the letter "e" among the letters of each response."""
    return [text.lower().count("e") / max(sum(c.isalpha() for c in text), 1) for text in responses]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO as a plain loop over verbs.")
    option = parser.add_argument
    option("--config_path", type=Path, help="a recipe, which sets the options below; may begin at this directory")
    option("--actor_model", default="gpt2", help="name or directory of the policy (default: %(default)s)")
    option("--critic_model", default=None, help="of the value model (default: the actor's)")
    option("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    option("--batch_size", type=int, default=16, help="samples a step (default: %(default)s)")
    option("--max_new_tokens", type=int, default=16, help="length of a response (default: %(default)s)")
    option("--lr", type=float, default=1e-5, help="learning rate of both models (default: %(default)s)")
    option("--num_rollout_workers", type=int, help="ranks that only generate (default: those that train do)")
    option("--num_update_workers", type=int, default=1, help="beside them: ranks that train (default: %(default)s)")
    words = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    args = parser.parse_args(words)
    if args.config_path is None:
        return args
    file = args.config_path if args.config_path.exists() else Path(__file__).parent / args.config_path
    recipe = load_config(file)
    parser.set_defaults(
        actor_model=recipe.actor_rollout_ref.model.path,
        critic_model=recipe.critic.model.path,
        steps=recipe.trainer.total_steps,
        batch_size=recipe.data.batch_size,
        max_new_tokens=recipe.actor_rollout_ref.rollout.max_new_tokens,
        lr=recipe.actor_rollout_ref.actor.optim.lr,
    )
    return parser.parse_args(words)


def _underscored(word: str) -> str:
    """--num-rollout-workers=2 as --num_rollout_workers=2."""
    if not word.startswith("--"):
        return word
    name, sign, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{sign}{value}"


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = parse(argv)
    placement = None
    if args.num_rollout_workers is not None:
        placement = {"rollout": args.num_rollout_workers, "actor": args.num_update_workers}
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
        reward = sum(rewards["reward"]) / len(rewards)
        history.append(reward)
        losses = f"loss/actor {policy['loss']:+.4f}  loss/critic {value['loss']:.4f}"
        print(f"step {step}  reward {reward:.4f}  {losses}")
    return history


if __name__ == "__main__":
    main()
