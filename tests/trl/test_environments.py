"""An episode in an environment beside TRL's own: the same turns make the same tokens, masks, messages and reward."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.rollout.test_environments import play
from tests.templates import byte_level
from tests.trl.environment_script import TURNS, Counter
from tests.trl.test_trl import PEER
from verl.rollout.environments import EnvironmentEpisode

SCRIPT = Path(__file__).parent / "environment_script.py"


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl")
def test_an_episode_is_that_of_trl(tmp_path: Path) -> None:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    env = {**os.environ, "PYTHONPATH": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run([PEER, SCRIPT, tmp_path], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"prompt"')))

    tokenizer.chat_template = theirs["template"]
    row = {"id": "a", "messages": json.dumps([{"role": "user", "content": "Count."}]), "prompt_tokens": [1], "start": 3}
    (outcome,), _ = play(EnvironmentEpisode(Counter), tokenizer, TURNS, [row], max_new_tokens=2048)
    assert outcome.error is None
    (ours,) = outcome.responses
    assert ours.prompt_tokens == theirs["prompt"]
    assert (ours.response_tokens, ours.response_mask) == (theirs["tokens"], theirs["mask"])
    assert ours.reward == theirs["reward"] == theirs["total"] == 7.0
    assert ours.messages[1:] == theirs["messages"]
