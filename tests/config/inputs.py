"""Inputs on which two values of a setting are compared: that of a number is always the same, and no two are alike."""

from __future__ import annotations

import random
import string
from typing import Any

from verl.batch import Batch
from verl.data.tasks import task_rows

#: Of rewards' problems: neighbouring seeds share most of them.
APART = 1000
#: How far log-probs of the policy that sampled are from those of a random model, in nats; ratios up to e^4 and down to
#: its inverse come first.
SPREADS = (4.0, 0.05, 1.0)
#: Log-prob of a token under a model that knows nothing.
RANDOM = -5.55
#: Ids that every model of these tests has, without the special ones.
TOKENS = range(4, 258)


def texts(number: int, count: int = 4) -> list[str]:
    """Prompts of 1 to 40 letters, digits and spaces."""
    draw = random.Random(number)
    letters = string.ascii_letters + string.digits + "   "
    return ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(count)]


def token_prompts(number: int, count: int = 4) -> list[list[int]]:
    """Prompts of 1 to 20 tokens."""
    draw = random.Random(number)
    return [draw.choices(TOKENS, k=draw.randint(1, 20)) for _ in range(count)]


def scored(number: int) -> Batch:
    """Four groups of four samples with rewards, of a policy that is far from the one that is trained, or near it."""
    draw = random.Random(number)
    spread = SPREADS[number % len(SPREADS)]
    lengths = [draw.randint(1, 12) for _ in range(16)]
    return Batch.from_columns({
        "id": [f"{row // 4}/{row}" for row in range(16)],
        "group": [f"g{row // 4}" for row in range(16)],
        "prompt_tokens": [prompt for prompt in token_prompts(number) for _ in range(4)],
        "response_tokens": [draw.choices(TOKENS, k=length) for length in lengths],
        "response_mask": [[int(t == 0 or draw.random() < 0.85) for t in range(length)] for length in lengths],
        "rollout_log_probs": [
            [min(RANDOM + draw.uniform(-spread, spread), 0.0) for _ in range(length)] for length in lengths
        ],
        "reward": [draw.choice([0.0, 0.25, 1.0, 1.0, 2.0]) + draw.uniform(-0.1, 0.1) for _ in range(16)],
    })  # fmt: skip


def answered(number: int) -> list[dict[str, Any]]:
    """Problems with an answer each: the right number alone, in a tag, in a sentence, or another one."""
    draw = random.Random(number)
    rows = []
    for row in task_rows({"task": "chain_sum", "size": 6, "seed": APART * number}):
        answer = row["reward_model"]["ground_truth"]
        said = [answer, f"It is <answer>{answer}</answer>, {'e' * draw.randint(0, 5)}.", f"{answer} or so", "17"]
        rows.append({**row, "prompt": row["question"], "response": draw.choice(said), "ground_truth": answer})
    return rows
