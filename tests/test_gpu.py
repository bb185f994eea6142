"""On an accelerator: training and generation as on the CPU. Without one these tests fail; see `make gpu`.

`--device cpu` runs them there: what they try is then known to work, and what an accelerator does is not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl
from verl._host import device
from verl.attention import flash
from verl.models.packed import PackedModel
from verl.rollout.base import Request, generate
from verl.rollout.embedded.engine import EmbeddedEngine

pytestmark = pytest.mark.gpu
PROMPTS = ["Once upon a time", "In the beginning"]
SHORT = verl.SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    found: str | None = request.config.getoption("--device") or device.accelerator()
    assert found is not None, "torch finds no accelerator on this machine"
    return found


def low_bytes(texts: list[str]) -> list[float]:
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_plain_script_trains_on_the_accelerator(tiny: Path, kind: str, algorithm: str) -> None:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT, placement=kind)
    trainer = verl.Trainer(actor, reward_fn=low_bytes, algorithm=algorithm, n=8, log_dir=False)
    rewards = [trainer.step(PROMPTS)["reward"] for _ in range(30)]
    assert device.of(actor.model).startswith(kind)
    assert device.peak_memory(device.of(actor.model)) > 0
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2


def test_log_probs_are_those_of_transformers_on_the_cpu(tiny: Path, kind: str) -> None:
    actor = verl.Actor(str(tiny), dtype="float32", sampling=SHORT, placement=kind)
    samples = actor.generate_sequences(PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    expected = []
    for prompt, response in zip(samples["prompt_tokens"], samples["response_tokens"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    for found in (samples.tensor("rollout_log_probs"), actor.compute_log_probs(samples).tensor("log_probs")):
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)


def test_recorded_steps_ahead_give_the_tokens_of_steps_in_turn(tiny: Path, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).to(kind)
    packed = PackedModel(model)
    params = verl.SamplingParams(max_new_tokens=20, temperature=0, ignore_eos=True)
    requests = [Request(str(i), [5 + i, 6, 7], params) for i in range(11)]
    samples = []
    for ahead in (False, True):
        engine = EmbeddedEngine(packed, eos_token_ids=(2,), seed=0, max_length=64, compiled=False, look_ahead=ahead)
        samples.append({sample.id: sample for sample in generate(engine, requests)})
    assert engine.runner.decode_steps
    if kind == "cuda" and flash.flash_attention(engine.cache.values, paged=True) is not None:
        assert all(step._recorded is not None for step in engine.runner.decode_steps.values())
    # Keys may be split differently, so a tie of two tokens may be decided otherwise: then what follows differs.
    first, second = samples
    same = [first[name].tokens == sample.tokens for name, sample in second.items()]
    assert sum(same) >= 9, same
    for name, equal in zip(second, same, strict=True):
        if equal:
            assert first[name].log_probs == pytest.approx(second[name].log_probs, abs=0.05)


def test_nothing_of_the_cpu_kernels_is_imported_or_built(tiny: Path, kind: str) -> None:
    if kind == "cpu":
        pytest.skip("the CPU has its kernels")
    script = (
        "import sys, verl\n"
        "actor = verl.Actor(sys.argv[1], sampling={'max_new_tokens': 2})\n"
        "trainer = verl.Trainer(actor, reward_fn=lambda texts: [1.0] * len(texts), n=2, log_dir=False)\n"
        "trainer.step(['a'])\n"
        "assert 'verl.kernels.build' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
