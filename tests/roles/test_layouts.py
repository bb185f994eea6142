"""The hybrid engine by the words of the articles."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import verl
from tests.ranks import ENV
from verl.errors import ConfigError
from verl.models.memory import ModelSize
from verl.planner import hardware
from verl.planner.cost import Costs, Workload
from verl.planner.hardware import DEVICES, GB, Cluster
from verl.planner.memory import ddp, fsdp
from verl.roles import layouts
from verl.weights.layout import Layout, ModelShape

SAMPLING = {"max_new_tokens": 4}


def made(tiny: Path, **options: Any) -> tuple[verl.Actor, verl.Critic]:
    return verl.Actor(str(tiny), sampling=SAMPLING, optim={"lr": 1e-3}, **options), verl.Critic(str(tiny))


@pytest.mark.slow
def test_a_role_updater_is_ppo_over_an_actor_and_its_critic(tiny: Path) -> None:
    weights = []
    for make in (
        lambda pair: verl.PPORoleUpdater(model=pair, engine="hybrid", overlap_comm=True),
        lambda pair: verl.PPORoleUpdater({"actor": pair[0], "critic": pair[1]}),
        lambda pair: verl.PPORoleUpdater(SimpleNamespace(actor=pair[0], critic=pair[1])),
        lambda pair: verl.Updater("ppo", actor=pair[0], critic=pair[1]),
    ):
        actor, critic = made(tiny)
        updater = make((actor, critic))
        sequences = actor.generate_sequences(["One", "Two"], n=2, key="k")
        assert {"loss/actor", "loss/critic"} <= updater.update(sequences, [0.0, 1.0, 2.0, 3.0]).keys()
        weights.append([weight.detach().clone() for model in (actor, critic) for weight in model.model.parameters()])
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


@pytest.mark.parametrize(
    ("train", "share", "expected"),
    [
        ({"strategy": "fsdp"}, 1e6, Layout(replicate=4)),  # so often the weights fit into the free memory of a rank
        ({"strategy": "fsdp"}, 1.5, Layout(replicate=2, tp=2)),
        ({"tensor_parallel_size": 2}, 0.1, Layout(replicate=2, tp=2)),  # two key-value heads: four cannot be
        ({}, 1e6, Layout(replicate=4)),
    ],
)
def test_few_ranks_share_a_copy_of_a_small_model_where_memory_allows(
    tiny: Path, monkeypatch: Any, caplog: Any, train: dict[str, Any], share: float, expected: Layout
) -> None:
    actor, _ = made(tiny, placement="cpu:0-3", train=train)
    size = ModelSize.from_model(actor.model).weight_bytes
    monkeypatch.setattr(layouts, "free_memory", lambda *where: int(4 * share * size))
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [0.0] * len(texts), algorithm="grpo", n=2, log_dir=False)
    with caplog.at_level(logging.INFO, "verl"):
        mesh = trainer.enable_3d_hybrid_engine(overlap_comm=True)
    assert mesh.layout == expected and actor.rollout_options.tensor_parallel == expected.tp
    assert actor.rollout_options.overlap_comm
    said = "nothing moves" if not train else "arrive while prompts are computed"
    assert said in caplog.text


@pytest.mark.parametrize("train", [{"strategy": "fsdp"}, {"tensor_parallel_size": 8}], ids=["fsdp", "tensor"])
@pytest.mark.parametrize("layers", [16, 80])
@pytest.mark.parametrize("link", [2, 300])
@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_choice_is_within_a_tenth_of_the_best_of_all_sizes(
    tiny: Path, monkeypatch: Any, train: dict[str, Any], layers: int, link: int, tokens: int
) -> None:
    """By the planner's costs, on devices of 80 GB with a fast and a slow link, for models of 3 and 15 billion
    weights: the sizes that memory allows are tried one by one here."""
    size = ModelSize(
        layers * 177_000_000, layers, 4096, 11008, heads=32, kv_heads=8, head_dim=128, vocab=32000, itemsize=2
    )
    device, ranks = replace(DEVICES["a100"], link=link * GB), 8
    monkeypatch.setattr(hardware, "CPU", device)
    monkeypatch.setattr(layouts, "free_memory", lambda *where: int(ranks * 60 * GB))
    monkeypatch.setattr(ModelSize, "from_model", lambda model: size)
    monkeypatch.setattr(layouts.ModelShape, "of", lambda config: ModelShape(layers=layers, heads=32, kv_heads=8))
    actor = verl.Actor(str(tiny), placement="cpu:0-7", train=train, sampling={"max_new_tokens": tokens})
    chosen = layouts.enable_hybrid_engine(actor).layout.tp
    costs = Costs(Cluster(1, ranks, device, 8 * device.network), Workload(response=tokens, max_num_seqs=256))
    strategy = fsdp(2) if "strategy" in train else ddp(2)
    layout = Layout(shard=8) if "strategy" in train else Layout(tp=8)
    seconds = {}
    for tp in (1, 2, 4, 8):
        engine = costs.generate(size, ranks, tp, 60 * GB - size.weight_bytes / tp)
        if engine is not None and size.weight_bytes / tp <= 30 * GB:
            seconds[tp] = engine.seconds + costs.transition(size, strategy, layout, tp)[1]
    assert seconds[chosen] <= 1.1 * min(seconds.values()), seconds


def test_what_cannot_be_is_refused_by_name(tiny: Path) -> None:
    actor, critic = made(tiny)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2 does not divide the 1 rank that generate"):
        layouts.enable_hybrid_engine(actor, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="no engine is called 'hybird'"):
        verl.PPORoleUpdater((actor, critic), engine="hybird")
    with pytest.raises(ConfigError, match="give engine='hybrid'"):
        verl.PPORoleUpdater((actor, critic), overlap_comm=True)
    with pytest.raises(ConfigError, match="an actor and its critic"):
        verl.PPORoleUpdater("gpt2")
    apart = verl.Actor(str(tiny), placement={"actor": "cpu:0-1", "rollout": "cpu:2-3"})
    with pytest.raises(ConfigError, match="devices of its own"):
        layouts.enable_hybrid_engine(apart)
    own = verl.Actor(str(tiny), rollout=lambda *given: None)
    with pytest.raises(ConfigError, match="engines embedded, hf and vllm"):
        layouts.enable_hybrid_engine(own)
    actor, _ = made(tiny)
    actor.generate_sequences(["One"])
    with pytest.raises(ConfigError, match="before the first call"):
        layouts.enable_hybrid_engine(actor)


def test_a_hybrid_shard_without_a_size_is_refused_on_ray_wherever_the_placement_comes_from(tiny: Path) -> None:
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    worker = verl.FSDPWorker(model_name=str(tiny), fsdp_config=hybrid)
    with pytest.raises(ConfigError, match="HYBRID_SHARD needs fsdp_size"):
        verl.Trainer(worker, reward_fn=len, algorithm="grpo", n=2, placement="cpu:0-1", log_dir=False)
    with pytest.raises(ConfigError, match="HYBRID_SHARD needs fsdp_size"):
        verl.FSDPWorker(model_name=str(tiny), fsdp_config=hybrid, placement="cpu:0-1")
    sized = verl.FSDPWorker(model_name=str(tiny), fsdp_config={**hybrid, "fsdp_size": 2})
    sized.set_placement("cpu:0-3")
    assert sized.controller.meshes("actor", sized.train_options)["train"].layout == Layout(replicate=2, shard=2)


class TwoThings(verl.FSDPWorker):
    """Gives so many things of `_build_model_optimizer`."""

    more: tuple[Any, ...] = ()

    def _build_model_optimizer(self, model_path: Any, *_: Any, **__: Any) -> Any:
        return (model_path, *self.more)


def test_a_model_and_an_optimizer_without_a_schedule_are_taken(tiny: Path) -> None:
    TwoThings.more = (lambda weights: torch.optim.SGD(weights, lr=0.1),)
    assert TwoThings(model_name=str(tiny)).train_options.optimizer is TwoThings.more[0]
    TwoThings.more = (None, None, None)
    with pytest.raises(ConfigError, match="not 4 things"):
        TwoThings(model_name=str(tiny))


@pytest.mark.slow
def test_a_driver_without_gpus_asks_the_cluster_how_many_a_machine_has(tiny: Path) -> None:
    script = f"""
import logging, ray, torch, verl
from verl.roles import layouts
ray.init(num_cpus=2, num_gpus=4, include_dashboard=False)
actor = verl.Actor({str(tiny)!r}, placement="cuda:0-3", strategy="fsdp")
print("machine", actor.controller.transport.devices_a_machine, torch.cuda.device_count())
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENV, capture_output=True, text=True, timeout=200)
    assert "machine 4 0" in done.stdout, done.stderr[-3000:]
