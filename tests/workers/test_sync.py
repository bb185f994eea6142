"""An engine with a copy of the weights: what it serves is compared with what is trained, after each update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import verl
from verl.errors import ConfigError, RolloutError
from verl.rollout.hf import HFEngine
from verl.weights.shard import Shard
from verl.weights.shards import load_model_shards

#: More than a block of the cache: what is kept of it belongs to one version of the weights.
_LONG = "Once upon a time there was " * 20


class Copying(HFEngine):
    """Generates with a copy of the model; updates of some kinds of weights may get lost on the way to it."""

    lost = ""

    def __init__(self, packed: Any, tokenizer: Any, eos: tuple[int, ...], options: Any) -> None:
        super().__init__(copy.deepcopy(packed.model), tokenizer, eos_token_ids=eos, seed=options.seed)

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        state = self.model.state_dict()
        kept = [s if not self.lost or self.lost not in s.name else Shard.whole(s.name, state[s.name]) for s in shards]
        load_model_shards(self.model, kept)
        self.policy_version = version

    def score(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> list[float]:
        ids = torch.tensor([[*prompt_tokens, *response_tokens]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(prompt_tokens) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt_tokens) :, None])[:, 0].tolist()


def trainer(tiny: Path, kind: type[Copying], lr: float = 1e-2) -> verl.Trainer:
    sampling = verl.SamplingParams(max_new_tokens=8, ignore_eos=True)
    actor = verl.Actor(str(tiny), rollout=kind, optim={"lr": lr}, sampling=sampling)
    return verl.Trainer(actor, reward_fn=lambda texts: [float(len(set(text))) for text in texts], n=4, log_dir=False)


def test_a_copy_in_step_is_reported_in_each_step(tiny: Path) -> None:
    run = trainer(tiny, Copying)
    for _ in range(3):
        record = run.step(["Once upon a time"])
        assert 0 <= record["sync/mismatch"] <= record["sync/mismatch/max"] < 1e-4
        assert 0 <= record["mismatch/log_ratio/max"] < 1e-4


@pytest.mark.parametrize("lost", ["model", "embed_tokens", "layers.1.mlp"])
def test_weights_that_do_not_arrive_end_the_run(tiny: Path, lost: str) -> None:
    run = trainer(tiny, type("Losing", (Copying,), {"lost": lost}))
    with pytest.raises(RolloutError, match="other weights than the trainer"):
        run.step(["Once upon a time"])


def test_an_engine_that_begins_with_other_weights_is_seen_before_the_first_update(tiny: Path) -> None:
    class Foreign(Copying):
        lost = "model"

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)

    run = trainer(tiny, Foreign, lr=0.0)
    with pytest.raises(RolloutError, match=r"at most 0\.1 is expected"):
        run.step(["Once upon a time"])
    assert run.actor.policy_version == 0


@pytest.mark.quick("dtype0-embedded")
@pytest.mark.parametrize("rollout", ["embedded", "hf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_updates_an_engine_is_as_near_as_a_fresh_one(
    make_tiny: Callable[..., Path], tmp_path: Path, rollout: str, dtype: torch.dtype
) -> None:
    def differences(sampler: verl.Actor, trainer: verl.Actor) -> np.ndarray:
        batch = sampler.generate_sequences([_LONG, "b"], n=8)
        trained = trainer.compute_log_probs(batch)["log_probs"]
        return np.abs(np.concatenate(batch["rollout_log_probs"]) - np.concatenate(trained))

    def actor(path: Path) -> verl.Actor:
        return verl.Actor(str(path), rollout=rollout, optim={"lr": 1e-3}, sampling=sampling)

    sampling = verl.SamplingParams(max_new_tokens=40, ignore_eos=True)
    origin = make_tiny("llama", dtype)
    trained = actor(origin)
    run = verl.Trainer(trained, reward_fn=lambda texts: [float(len(set(text))) for text in texts], n=4, log_dir=False)
    for _ in range(3):
        run.step([_LONG])
    after = differences(trained, trained)
    trained.save_pretrained(str(tmp_path / "saved"))
    fresh = differences(*[actor(tmp_path / "saved")] * 2)
    # The control: an engine that has had none of the updates.
    stale = differences(actor(origin), trained)
    if dtype == torch.float32:
        assert after.max() < 1e-3 < stale.max()
    else:
        assert 0 < after.mean() < 0.05
        assert after.mean() < 1.2 * fresh.mean() < stale.mean()


def test_unknown_engines_are_named(tiny: Path, tmp_path: Path) -> None:
    for name, message in (("embeded", "did you mean 'embedded'"), ("no/such.py:Mine", "does not exist")):
        with pytest.raises(ConfigError, match=message):
            verl.Actor(str(tiny), rollout=name).generate_sequences(["a"])
    (tmp_path / "mine.py").write_text("class Engine: pass")
    with pytest.raises(ConfigError, match="did you mean 'Engine'"):
        verl.Actor(str(tiny), rollout=f"{tmp_path}/mine.py:Engin").generate_sequences(["a"])
