"""Small whole runs of `verl train` on a tiny real model: their settings, their processes, what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests import forked
from verl.checkpoint.store import load_checkpoint

REWARD = '''
import os
import signal


def low(responses, prompts):
    return [sum(ord(c) < 100 for c in r) / max(len(r), 1) for r in responses]


def killing(responses, prompts):
    """Dies without a word when the file that KILL_FILE names has a number of calls left of 0."""
    path = os.environ["KILL_FILE"]
    left = int(open(path).read())
    open(path, "w").write(str(left - 1))
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return low(responses, prompts)


killing.whole_batch = True


calls = []


def late(responses, prompts):
    """Abstains in the first call, which is the first evaluation's."""
    calls.append(prompts)
    return low(responses, prompts) if len(calls) > 1 else [None] * len(responses)


late.whole_batch = True


def signs(responses, prompts):
    return [-1.0] * len(responses)


def broken(responses, prompts):
    raise OSError("no such file")


def nothing(responses, prompts):
    return [None] * len(responses)


def huge(responses, prompts):
    return [1e308] * len(responses)


def high(responses, prompts):
    return [1.0] * len(responses)
'''


TIMED = ("time/", "busy/", "_per_s", "memory/")


def settings(tmp_path: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a small run, with dotted keys changed."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    lines = [{"prompt": f"Tell me about the number {i}"} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"prompt": f"And about {i}?"}) + "\n" for i in range(6)))
    flat = {
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.max_new_tokens": 6,
        "data.train": str(tmp_path / "train.jsonl"),
        "data.eval": str(tmp_path / "eval.jsonl"),
        "data.batch_size": 3,
        "reward.path": f"{reward}:low",
        "trainer.total_steps": 6,
        "trainer.save_every": 2,
        "trainer.eval_every": 3,
        "trainer.output_dir": str(tmp_path / "runs"),
        "trainer.loggers": ["tensorboard"],
        "trainer.run_name": "test",
        **changes,
    }
    if flat.get("algorithm.name") in ("dpo", "sft"):
        del flat["actor_rollout_ref.rollout.max_new_tokens"]  # nothing is sampled
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = nested
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return nested


def run_dir(tmp_path: Path) -> Path:
    return (tmp_path / "runs" / "latest").resolve()


def rows(directory: Path) -> list[dict[str, Any]]:
    """Metric rows without what a clock measured."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not any(t in k for t in TIMED)} for line in lines]


def evals(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()]


def final_state(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(directory / "checkpoints" / "latest")
    names = ("actor/weights", "actor/optimizer", "critic/weights", "critic/optimizer", "random")
    return {f"{n}:{k}": v for n in names if n in checkpoint for k, v in checkpoint.tensors(n).items()}


def assert_same_run(a: Path, b: Path) -> None:
    first, second = final_state(a), final_state(b)
    assert first.keys() == second.keys() and len(first) > 10
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert rows(a) == rows(b)
    steps = [f"train-{row['step']:06d}.parquet" for row in rows(a) if "reward" in row]
    for run in (a, b):
        assert sorted(file.name for file in (run / "completions").glob("train-*")) == steps
    for name in steps:
        assert (a / "completions" / name).read_bytes() == (b / "completions" / name).read_bytes(), name


def run_process(tmp_path: Path, configuration: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(configuration))
    return forked.Popen(
        [sys.executable, "-m", "verl", "train", str(file)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def count_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0
