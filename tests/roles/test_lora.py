"""Actors and critics that train adapters."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import verl
from verl.algorithms import make_algorithm
from verl.checkpoint.store import load_checkpoint
from verl.checkpoint.verify import verify
from verl.errors import CheckpointError, ConfigError
from verl.models.loading import load_model
from verl.rollout.hf import HFEngine
from verl.run.export import export
from verl.weights.shard import Shard, checksum

LORA = {"r": 4, "alpha": 8}
SAMPLING = {"max_new_tokens": 8, "ignore_eos": True}
PROMPTS = ["Once upon a time", "In the beginning"]


def make(path: Path, **options: Any) -> verl.Actor:
    return verl.Actor(
        str(path), **{"lora": LORA, "dtype": "float32", "optim": {"lr": 1e-2}, "sampling": SAMPLING, **options}
    )


def step(actor: verl.Actor, key: str = "k") -> dict[str, float]:
    sequences = actor.generate_sequences(PROMPTS, n=4, key=key)
    return actor.update(sequences, [float(sum(tokens) % 7) for tokens in sequences["response_tokens"]])


class Apart(HFEngine):
    """Generates with a plain model of its own, as engines in other processes do."""

    is_live = False

    def __init__(self, packed: Any, tokenizer: Any, eos: tuple[int, ...], options: Any) -> None:
        plain = AutoModelForCausalLM.from_config(type(packed.model.config).from_dict(packed.model.config.to_dict()))
        super().__init__(plain.eval(), tokenizer, eos_token_ids=eos, seed=options.seed)


@pytest.mark.parametrize("engine", ["embedded", "hf", Apart])
def test_log_probs_of_every_engine_are_the_trainers_under_the_adapter(tiny: Path, engine: Any) -> None:
    actor, base = make(tiny, rollout=engine), make(tiny, lora=None)
    for number in range(3):
        step(actor, key=f"k{number}")
    sequences = actor.generate_sequences(PROMPTS, n=4)
    own = actor.compute_log_probs(sequences).tensor("log_probs")
    assert float((own - sequences.tensor("rollout_log_probs")).abs().max()) < 1e-4
    assert float((own - base.compute_log_probs(sequences).tensor("log_probs")).abs().max()) > 0.01


def test_the_reference_is_the_base_and_takes_no_memory(tiny: Path) -> None:
    algorithm = {"algorithm": make_algorithm("grpo", kl_in="loss", kl_coef=0.5), "dtype": "float64"}
    actor, other = make(tiny, **algorithm), make(tiny, **algorithm)
    other.make_reference(load_model(tiny, dtype="float64"))
    for number in range(3):
        before = living()
        metrics = step(actor, key=f"k{number}")
        if number:  # the optimizer's state comes with the first step
            assert living() == before
        expected = step(other, key=f"k{number}")
        assert metrics["kl"] == pytest.approx(expected["kl"], abs=1e-12)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-12)
    assert metrics["kl"] > 1e-4
    assert actor.reference.model is None and actor._reference is None


def living() -> int:
    """Bytes of all weights and buffers of modules in this process."""
    gc.collect()
    modules = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Module)]
    storages = {t.untyped_storage().data_ptr(): t.nbytes for m in modules for t in (*m.parameters(), *m.buffers())}
    return sum(storages.values())


def test_a_run_with_adapters_resumes_bit_for_bit_and_is_exported(tiny: Path, tmp_path: Path) -> None:
    def trainer(**options: Any) -> verl.Trainer:
        return verl.Trainer(
            make(tiny, **options), None, lambda texts: [float(len(set(text))) for text in texts], n=4, log_dir=False
        )

    whole = trainer()
    for _ in range(2):
        whole.step(PROMPTS)
    whole.save_checkpoint(tmp_path / "saved")
    again = trainer()
    again.load_checkpoint(tmp_path / "saved")
    for name, run in (("one", whole), ("other", again)):
        run.step(PROMPTS)
        run.save_checkpoint(tmp_path / name)
    one, other = (load_checkpoint(tmp_path / name) for name in ("one", "other"))
    for part in ("actor/weights", "actor/optimizer"):
        assert checksum(one.shards(part)) == checksum(other.shards(part))
    for part in ("actor/weights", "actor/optimizer"):
        assert all(".lora_" in shard.name for shard in one.shards(part))
    assert verify(tmp_path / "saved").ok
    again.load_checkpoint(tmp_path / "saved")
    tokens = torch.arange(5, 25)[None]
    export(tmp_path / "saved", tmp_path / "merged")
    export(tmp_path / "saved", tmp_path / "adapter", adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tiny)
    plain = base(tokens).logits.detach()
    from_peft = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    expected = again.actor.model(tokens).logits.detach()
    assert float((expected - plain).abs().max()) > 0.01
    for found in (merged, from_peft):
        assert float((found(tokens).logits.detach() - expected).abs().max()) < 1e-4
    with pytest.raises(CheckpointError):
        trainer(lora=None).load_checkpoint(tmp_path / "saved")


def test_the_base_of_a_checkpoint_is_the_one_of_then(tiny: Path, make_tiny: Any, tmp_path: Path) -> None:
    def trainer(path: Path, live: bool = False) -> verl.Trainer:
        actor = make(path)
        if live:  # weights that are not those of its files are saved
            actor.load_shards([Shard.whole(s.name, s.tensor * 1.5) for s in actor.shards()])
        return verl.Trainer(actor, None, lambda texts: [float(len(text)) for text in texts], n=2, log_dir=False)

    base = shutil.copytree(tiny, tmp_path / "base")
    trainer(base).save_checkpoint(tmp_path / "adapters")
    trainer(base, live=True).save_checkpoint(tmp_path / "whole")
    names = [
        {s.name for s in load_checkpoint(tmp_path / name).shards("actor/weights")} for name in ("adapters", "whole")
    ]
    assert names[0] == {name for name in names[1] if ".lora_" in name} < names[1]
    assert all(verify(tmp_path / name).ok for name in ("adapters", "whole"))
    again = trainer(base)
    again.load_checkpoint(tmp_path / "whole")
    saved = {shard.name: shard.tensor for shard in load_checkpoint(tmp_path / "whole").shards("actor/weights")}
    assert all(torch.equal(shard.tensor, saved[shard.name]) for shard in again.actor.shards())
    trainer(base).load_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"whose files differ: give model\.path the base of then"):
        trainer(make_tiny("llama", seed=5)).load_checkpoint(tmp_path / "adapters")
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match="Put the base back there"):
        export(tmp_path / "adapters", tmp_path / "out")


def test_a_critic_trains_adapters_and_its_head(tiny: Path) -> None:
    critic = verl.Critic(str(tiny), str(tiny), lora=LORA, optim={"lr": 1e-2})
    before = {name: weight.detach().clone() for name, weight in critic.model.named_parameters()}
    sequences = make(tiny, lora=None).generate_sequences(PROMPTS, n=2)
    for _ in range(3):  # a new head is zero, and so is half of each adapter: gradients arrive one step after the other
        critic.update(sequences, [1.0, 0.0, 0.5, 1.0])
    changed = {name for name, weight in critic.model.named_parameters() if not torch.equal(weight, before[name])}
    assert {"score.weight", "score.bias"} < changed
    assert all(name.startswith("score.") or ".lora_" in name for name in changed)
    assert any(".lora_A." in name for name in changed)


def test_settings_of_adapters_are_checked(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank: unknown key"):
        make(tiny, lora={"rank": 4})
    with pytest.raises(ConfigError, match=r"lora\.r: must be at least 1"):
        make(tiny, lora={"r": 0})
