"""PPO as a plain loop over verbs.

    python examples/ppo_simple.py
    python examples/ppo_simple.py --num_rollout_workers 2 --num_update_workers 1 --actor_model gpt2 --critic_model gpt2

The reward counts the letter "e", so a few steps on a laptop show it rise. Options may be written with dashes or
underscores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import verl


def letter_e(responses: list[str]) -> list[float]:
    """The share of the letter "e" among the letters of each response."""
    return [text.lower().count("e") / max(sum(c.isalpha() for c in text), 1) for text in responses]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO as a plain loop over verbs.")
    option = parser.add_argument
    option("--actor_model", default="gpt2", help="name or directory of the policy (default: %(default)s)")
    option("--critic_model", default=None, help="of the value model (default: the actor's)")
    option("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    option("--batch_size", type=int, default=16, help="samples a step (default: %(default)s)")
    option("--max_new_tokens", type=int, default=16, help="length of a response (default: %(default)s)")
    option("--lr", type=float, default=1e-5, help="learning rate of both models (default: %(default)s)")
    option("--num_rollout_workers", type=int, default=1, help="shares of a rollout; in one process they take turns")
    option("--num_update_workers", type=int, default=1, help="shares of an update; in one process they take turns")
    return parser.parse_args([_underscored(word) for word in (sys.argv[1:] if argv is None else argv)])


def _underscored(word: str) -> str:
    """--num-rollout-workers=2 as --num_rollout_workers=2."""
    if not word.startswith("--"):
        return word
    name, sign, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{sign}{value}"


def main(argv: Sequence[str] | None = None) -> list[float]:
    args = parse(argv)
    share = -(-args.batch_size // args.num_update_workers)
    actor = verl.Actor.from_pretrained(args.actor_model, algorithm="ppo", optim={"lr": args.lr}, micro_batch_size=share)
    critic = verl.Critic.from_pretrained(
        args.critic_model or args.actor_model,
        actor_tokenizer=actor.tokenizer,
        optim={"lr": args.lr},
        micro_batch_size=share,
    )
    reward_model = verl.Reward(reward_fn=letter_e)
    prompts = ["Once upon a time"] * args.batch_size
    history = []
    for step in range(args.steps):
        shares = [prompts[i :: args.num_rollout_workers] for i in range(args.num_rollout_workers)]
        parts = [
            actor.generate_sequences(part, key=f"{step}.{i}", max_new_tokens=args.max_new_tokens)
            for i, part in enumerate(shares)
            if part
        ]
        sequences = verl.Batch.concat(parts)
        rewards = reward_model.get_reward(sequences)
        values = critic.compute_values(sequences)
        policy = actor.update(sequences, rewards, values)
        value = critic.update(sequences.add(values), rewards)
        history.append(sum(rewards["reward"]) / len(rewards))
        print(
            f"step {step}  reward {history[-1]:.4f}  loss/actor {policy['loss']:+.4f}  loss/critic {value['loss']:.4f}"
        )
    return history


if __name__ == "__main__":
    main()
