"""Writes the recorded data of these examples: sums answered right and wrong, as pairs, labels and demonstrations.

    python examples/algorithms/make_data.py

Made by a seed; the files beside it in `data/` are what it writes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def problems(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Distinct (question, right answer, wrong answer)."""
    rng = random.Random(seed)
    sums = rng.sample([(a, b) for a in range(2, 60) for b in range(2, 60)], count)
    return [
        (f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", f"{a} + {b} = {a + b + rng.choice((-10, -2, 1, 3, 10))}.")
        for a, b in sums
    ]


def rows(kind: str, sums: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    if kind == "pairs":
        return [{"prompt": q, "chosen": right, "rejected": wrong} for q, right, wrong in sums]
    if kind == "labels":
        return [
            {"prompt": q, "completion": wrong if i % 2 else right, "label": not i % 2}
            for i, (q, right, wrong) in enumerate(sums)
        ]
    return [{"prompt": q, "completion": right} for q, right, _ in sums]


def main() -> None:
    DATA.mkdir(exist_ok=True)
    sums = problems(64, seed=0)
    for kind in ("pairs", "labels", "demonstrations"):
        for split, part in (("train", sums[:48]), ("eval", sums[48:])):
            lines = (json.dumps(row) + "\n" for row in rows(kind, part))
            (DATA / f"{kind}-{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
