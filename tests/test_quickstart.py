"""The quick start, word for word, with a `gpt2` in the Hugging Face cache, offline, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

QUICK_START = """
import verl as rl


def reward_fn(texts):
    return [float(len(set(text))) for text in texts]


actor = rl.Actor.from_pretrained("gpt2")
trainer = rl.PPOTrainer(actor=actor, reward_fn=reward_fn)
for _ in range(10):
    logs = trainer.step(["Once upon a time"] * 4)
    assert isinstance(logs["reward"], float), logs
    assert {"loss/actor", "loss/critic", "kl", "reward/mean"} <= logs.keys(), logs
    assert logs["updated"] is True
"""


@pytest.mark.slow
def test_quick_start_offline(make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--gpt2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir()
    make_tiny("gpt2").rename(snapshot)
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUICK_START], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss/actor" in done.stdout and "reward" in done.stdout
    assert list(tmp_path.glob("runs/*/tensorboard/events*")), "TensorBoard works out of the box"
