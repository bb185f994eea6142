"""Does each algorithm learn its own objective? Small runs beside controls that must not learn; a Markdown table.

    .venv/bin/python benchmarks/learning.py --out learning            # all algorithms, seeds 0 1 2, two runs at a time
    .venv/bin/python benchmarks/learning.py --algorithms grpo dpo --seeds 0

The task: three of twenty numbers are given and the largest is to be named. A two-layer Llama with a vocabulary of 23
words is first taught to name any of the three, so that it is right one time in three; every run starts from it. Half of
the 6840 problems are never trained on. After each step of the first and of the last tenth, the objective is measured on
problems of the held-out half, 1680 at each end, every one of them once and the two ends having none in common:

    reward        a sampled answer is right (algorithms that sample)
    preference    the right answer is more probable than a wrong one, or scores higher; a tie counts half (pairs,
                  labels, reward models)
    likelihood    log-probability of the right answer (demonstrations)

An algorithm has learned if in every seed the mean over the last tenth of the steps is at least three standard errors
above that of the first tenth, and above the last tenth of the same run with learning rate 0. An error is that of a
difference of two means of 1680 numbers each, one a problem. Of an algorithm with a constraint two more things are
asked, the cost of an answer being 1 if it names 14 or more: its mean over the last fifth of the steps is at most one
standard error above the limit, and above the limit without the constraint (the multiplier held at 0). The base
model's is above it too.

A run takes some seconds on one thread. Its result is a JSON file in the output folder, which is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice, permutations
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import verl
from verl.algorithms import algorithm_names, make_algorithm
from verl.rollout.constrained import ConstrainedEpisode

NUMBERS = range(20)
WORDS = ["<end>", "<unknown>", "=", *map(str, NUMBERS)]
COSTLY = 14
COST_LIMIT = 0.2
AN_END = 1680
CONTROL, UNCONSTRAINED, PERMUTED = "control", "unconstrained", "permuted"


@dataclass(frozen=True)
class Settings:
    """What a run of one algorithm uses, chosen by hand; the rest is the same for all."""

    lr: float = 1e-3
    steps: int = 40
    options: dict[str, Any] = field(default_factory=dict)


#: Where the common settings do not suit: a constraint needs time to settle, likelihood a lower rate.
SETTINGS: dict[str, Settings] = {
    "safe_rlhf": Settings(steps=240, options={"cost_limit": COST_LIMIT}),
    "constrained_decoding": Settings(lr=3e-4),
    "reward_conditioned": Settings(lr=3e-4, options={"prefixes": ["= ", "<unknown> "]}),
}
OFFLINE = Settings(lr=3e-4)


@dataclass
class Curve:
    """The objective on each held-out problem of the first and of the last tenth of the steps."""

    objective: str
    first: list[float]
    last: list[float]
    costs: list[float]
    """The mean cost of each step's samples, of an algorithm with a constraint."""
    seconds: float


Problem = tuple[int, ...]

_PROBLEMS: list[Problem] = list(permutations(NUMBERS, 3))
random.Random(0).shuffle(_PROBLEMS)
TRAINED, HELD_OUT = _PROBLEMS[::2], _PROBLEMS[1::2]


def prompt(numbers: Problem) -> str:
    return " ".join(map(str, numbers)) + " ="


def measured(seed: int, steps: int) -> dict[int, list[Problem]]:
    """Held-out problems, no two the same, for each step of the first and of the last tenth."""
    tenth = max(steps // 10, 1)
    size = AN_END // tenth
    chosen = iter(random.Random(seed).sample(HELD_OUT, 2 * tenth * size))
    return {step: list(islice(chosen, size)) for step in (*range(tenth), *range(steps - tenth, steps))}


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>", unk_token="<unknown>")


def make_base(path: Path) -> None:
    """A model that names one of the three numbers, any of them, saved to `path`; and in `path/teacher` one that goes on
    from there and names the largest, for algorithms that learn from a teacher."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    tokens, rng = tokenizer(), random.Random(0)
    rows = []
    for numbers in rng.choices(TRAINED, k=16000):
        rows.append({"prompt": prompt(numbers), "completion": str(rng.choice(numbers))})
    actor = verl.Actor(model, tokens, optim={"lr": 3e-3})
    trainer = verl.Trainer(actor, algorithm="sft", log_dir=False)
    loader = verl.OfflineDatasetLoader(rows, tokens, batch_size=128)
    for _ in range(300):
        trainer.step(next(loader))
    actor.save_pretrained(str(path))
    rows = [{"prompt": prompt(numbers), "completion": str(max(numbers))} for numbers in rng.choices(TRAINED, k=16000)]
    loader = verl.OfflineDatasetLoader(rows, tokens, batch_size=128)
    for _ in range(150):
        trainer.step(next(loader))
    actor.save_pretrained(str(path / "teacher"))


def right(responses: list[str], prompts: list[str]) -> list[float]:
    """The reward: 1 for the largest number."""
    largest = [str(max(map(int, p.split()[:3]))) for p in prompts]
    return [float(r.strip() == best) for r, best in zip(responses, largest, strict=True)]


def is_right(text: str, row: Mapping[str, Any]) -> bool:
    """The constraint, likewise."""
    return right([text], [row["prompt"]]) == [1.0]


def large(responses: list[str]) -> list[float]:
    """The cost: 1 for a number from COSTLY."""
    costly = {str(n) for n in NUMBERS if n >= COSTLY}
    return [float(r.strip() in costly) for r in responses]


def recorded(kind: str, problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Rows of recorded answers: pairs of a right and a wrong one, labelled ones, or right ones alone."""
    rng, rows = random.Random(seed), []
    for numbers in problems:
        best = max(numbers)
        wrong = rng.choice([n for n in numbers if n != best])
        if kind == "pairs":
            rows.append({"prompt": prompt(numbers), "chosen": str(best), "rejected": str(wrong)})
        elif kind == "labels":
            good = rng.random() < 0.5
            rows.append({"prompt": prompt(numbers), "completion": str(best if good else wrong), "label": good})
        else:
            rows.append({"prompt": prompt(numbers), "completion": str(best)})
    return rows


def kind_of(algorithm: verl.BaseAlgorithm) -> str:
    """What an offline algorithm learns from, tried out: the first kind of rows that it takes."""
    for kind in ("pairs", "labels", "demonstrations"):
        rows = verl.OfflineDatasetLoader(recorded(kind, TRAINED[:4], 0), tokenizer(), batch_size=4)
        wants_pairs, wants_labels = algorithm.coupled, "label" in algorithm.loss_columns
        if (kind == "pairs") == wants_pairs and (kind == "labels") == (wants_labels and not wants_pairs):
            return rows.kind
    raise SystemExit(f"{algorithm.name}: no rows suit it")


def run(name: str, seed: int, control: str, base: Path) -> Curve:
    """One run: the objective at both ends of it."""
    settings = SETTINGS.get(name, Settings() if make_algorithm(name).online else OFFLINE)
    algorithm = make_algorithm(name, **_options(settings, control))
    lr = 0.0 if control == CONTROL else settings.lr
    torch.manual_seed(seed)
    sampling = verl.SamplingParams(max_new_tokens=2)
    actor = verl.Actor.from_pretrained(
        str(base), optim={"lr": lr}, head=algorithm.head, sampling=sampling, seed=seed, dtype="float32"
    )
    if algorithm.online and "reference" in algorithm.roles:
        actor.make_reference(str(base / "teacher"))
    given: dict[str, Any] = {"reward_fn": right} if "reward" in algorithm.roles else {}
    if "cost" in algorithm.roles:
        given["cost"] = large
    if algorithm.needs_constraint:  # of what is sampled to be learned, not of what is measured
        given = {"tasks": [verl.Task(algorithm=algorithm, episode=ConstrainedEpisode(accept=is_right))]}
    else:
        given["algorithm"] = algorithm
    trainer = verl.Trainer(actor, log_dir=False, permute_rewards=control == PERMUTED, **given)
    objective, measure = _objective(trainer, seed)
    rng = random.Random(1000 + seed)
    batches: Callable[[], Any]
    if algorithm.online:
        batches = lambda: [prompt(numbers) for numbers in rng.choices(TRAINED, k=16)]  # noqa: E731
    else:
        rows = recorded(kind_of(algorithm), rng.choices(TRAINED, k=32 * settings.steps), seed)
        loader = verl.OfflineDatasetLoader(rows, actor.tokenizer, batch_size=32, seed=seed)
        batches = lambda: next(loader)  # noqa: E731
    began, held_out, costs = time.perf_counter(), measured(seed, settings.steps), []
    ends: tuple[list[float], list[float]] = ([], [])
    for step in range(settings.steps):
        record = trainer.step(batches())
        costs += [record["cost/mean"]] if "cost/mean" in record else []
        if step in held_out:
            ends[2 * step >= settings.steps].extend(measure(held_out[step], step))
    return Curve(objective, *ends, costs, time.perf_counter() - began)


def _options(settings: Settings, control: str) -> Mapping[str, Any]:
    """Without a constraint lambda is held at 0, and there is no limit to read."""
    return {"lambda_init": 0.0, "lambda_lr": 0.0} if control == UNCONSTRAINED else settings.options


def _objective(trainer: verl.Trainer, seed: int) -> tuple[str, Callable[[list[Problem], int], list[float]]]:
    """The objective of the trainer's algorithm, and how it is measured on problems after a step."""
    algorithm, actor = trainer.algorithm, trainer.actor
    if algorithm.online:

        def rewards(problems: list[Problem], step: int) -> list[float]:
            tests, key = [prompt(numbers) for numbers in problems], f"test{seed}.{step}"
            asked = actor.prefixed(actor.prompts(tests, key=key), algorithm)
            return right(list(actor.generate_sequences(asked)["response"]), tests)

        return "reward", rewards
    kind = "demonstrations" if kind_of(algorithm) == "demonstrations" else "pairs"

    def rows(problems: list[Problem]) -> verl.Batch:
        return verl.OfflineDatasetLoader(recorded(kind, problems, seed), actor.tokenizer, batch_size=1).batch

    def log_probs(batch: verl.Batch) -> list[float]:
        return [sum(row) for row in actor.compute_log_probs(batch)["log_probs"]]

    if kind == "demonstrations":
        return "likelihood", lambda problems, step: log_probs(rows(problems))

    def preferred(problems: list[Problem], step: int) -> list[float]:
        batch = rows(problems)
        if algorithm.head == "score":
            swapped = batch.drop(["label"]).add({"label": [1 - label for label in batch["label"]]})
            won, lost = (round(trainer.evaluate_loss(b)["pairs/accuracy"] * len(problems)) for b in (batch, swapped))
            return [1.0] * won + [0.0] * lost + [0.5] * (len(problems) - won - lost)
        found = log_probs(batch)
        return [(good > bad) + 0.5 * (good == bad) for good, bad in zip(found[::2], found[1::2], strict=True)]

    return "preference", preferred


def distance(a: list[float], b: list[float]) -> float:
    """How many standard errors the mean of `a` is above that of `b`."""
    error = sum(statistics.pvariance(x) / len(x) for x in (a, b)) ** 0.5
    difference = statistics.fmean(a) - statistics.fmean(b)
    return difference / error if error else (0.0 if not difference else float("inf") * (1 if difference > 0 else -1))


@dataclass
class Verdict:
    """One algorithm in one seed."""

    first: float
    last: float
    control: float
    above_first: float
    above_control: float
    seconds: float
    constraint: str = ""
    learned: bool = False


def judge(curve: Curve, control: Curve, unconstrained: Curve | None = None) -> Verdict:
    first, last, still = curve.first, curve.last, control.last
    verdict = Verdict(
        *(statistics.fmean(part) for part in (first, last, still)),
        above_first=distance(last, first),
        above_control=distance(last, still),
        seconds=curve.seconds,
    )
    verdict.learned = min(verdict.above_first, verdict.above_control) >= 3
    if unconstrained is not None:
        costs, free = (c.costs[-(len(c.costs) // 5) :] for c in (curve, unconstrained))
        error = (statistics.pvariance(costs) / len(costs)) ** 0.5
        kept = statistics.fmean(costs) <= COST_LIMIT + error
        verdict.constraint = f"cost {statistics.fmean(costs):.3f}, without constraint {statistics.fmean(free):.3f}"
        verdict.learned &= kept and statistics.fmean(free) > COST_LIMIT
    return verdict


def load(path: Path) -> Curve:
    return Curve(**json.loads(path.read_text()))


def runs_of(name: str) -> list[str]:
    return ["run", CONTROL, *([UNCONSTRAINED] if "cost" in make_algorithm(name).roles else [])]


def make_runs(name: str, seed: int, out: Path) -> None:
    """The runs of an algorithm and seed that are not there yet, in this process, each into its file."""
    torch.set_num_threads(1)
    for control in runs_of(name):
        path = out / f"{name}-{seed}-{control}.json"
        if not path.exists():
            curve = run(name, seed, control, out / "base")
            path.with_suffix(".part").write_text(json.dumps(asdict(curve)))
            path.with_suffix(".part").rename(path)


def table(names: list[str], seeds: list[int], out: Path) -> tuple[str, bool]:
    """The Markdown table, and whether every algorithm has learned in every seed."""
    lines = [
        "| algorithm | objective | first tenth | last tenth | lr 0 | s.e. above first, lr 0 | seconds | learned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    learned = True
    for name in names:
        verdicts = []
        for seed in seeds:
            parts = [load(out / f"{name}-{seed}-{part}.json") for part in runs_of(name)]
            verdicts.append(judge(*parts))
        learned &= all(v.learned for v in verdicts)
        means = [[f"{getattr(v, key):.2f}" for v in verdicts] for key in ("first", "last", "control")]
        errors = ", ".join(f"{v.above_first:.0f} {v.above_control:.0f}" for v in verdicts)
        note = "; ".join(v.constraint for v in verdicts if v.constraint)
        lines.append(
            f"| `{name}` | {parts[0].objective} | {' '.join(means[0])} | {' '.join(means[1])} | {' '.join(means[2])} | "
            f"{errors} | {max(v.seconds for v in verdicts):.0f} | "
            f"{'yes' if all(v.learned for v in verdicts) else 'NO'}{f' ({note})' if note else ''} |"
        )
    return "\n".join(lines), learned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in algorithm_names() if type(make_algorithm(name)).__module__.startswith("verl.")]
    parser.add_argument("--algorithms", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument(
        "--out", type=Path, default=Path("learning"), help="folder of the results; those that are there are kept"
    )
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help="just make the runs of one, in this process")
    args = parser.parse_args()
    if args.one:
        make_runs(args.one[0], int(args.one[1]), args.out)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "base" / "config.json").exists():
        make_base(args.out / "base")

    def start(item: tuple[str, int]) -> str:
        name, seed = item
        command = [sys.executable, __file__, "--out", str(args.out), "--one", name, str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOG_LEVEL": "ERROR"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
        line, learned = table([name], [seed], args.out) if not done.returncode else (done.stderr[-2000:], False)
        print(f"{name} seed {seed}: {'learned' if learned else 'NOT LEARNED'}\n  {line.splitlines()[-1]}", flush=True)
        return "" if not done.returncode else f"{' '.join(command)} failed"

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [text for text in pool.map(start, [(n, s) for s in args.seeds for n in args.algorithms]) if text]
    if failed:
        raise SystemExit("\n".join(failed))
    text, learned = table(args.algorithms, args.seeds, args.out)
    (args.out / "table.md").write_text(text + "\n")
    print("\n" + text)
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
