"""`rollout.name: auto`: vLLM on a GPU where it is installed and can do what is set, else the embedded engine.

There is no GPU here: an accelerator is made up, and whether vLLM is installed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.test_device import Fake
from tests.trainer.runs import settings
from verl._host import device
from verl.algorithms import make_algorithm
from verl.cli.doctor import check_engine
from verl.cli.plan import plan
from verl.config import Config, build_config
from verl.errors import ConfigError
from verl.models.options import LoraOptions
from verl.planner.hardware import Cluster
from verl.roles.layouts import enable_hybrid_engine
from verl.rollout import choice
from verl.rollout.choice import Choice, choose_engine
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.options import RolloutOptions
from verl.rollout.tools import ToolEpisode
from verl.run.memory import memory_on
from verl.run.resolved import FILE, resolve
from verl.run.train import train
from verl.workers.standalone import EngineRecipe

Install = Callable[[bool], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Says whether vLLM is installed."""

    def install(there: bool) -> None:
        monkeypatch.setattr(choice, "find_spec", lambda name: object() if there and name == "vllm" else None)

    install(True)
    return install


@pytest.fixture
def gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A machine with a GPU, on which vLLM is installed."""
    monkeypatch.setattr(device, "_accelerators", lambda: Fake("cuda", 1))
    monkeypatch.setattr("verl.cluster.controller._known", {})
    return install


def add(a: int, b: int) -> int:
    """Sum of two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def test_vllm_where_it_is_installed_on_a_gpu(install: Install) -> None:
    for where in ("cuda", "cuda:1"):
        assert choose_engine(RolloutOptions(), where) == Choice(
            "vllm", f"the actor is on {where}, and vLLM is installed"
        )
    assert choose_engine(RolloutOptions(), "cpu") == Choice("embedded", "the actor is on cpu")
    install(False)
    assert choose_engine(RolloutOptions(), "cuda") == Choice("embedded", "vLLM is not installed")
    assert choose_engine(RolloutOptions(url=("http://localhost:1",)), "cpu").name == "vllm"


@pytest.mark.parametrize(
    ("set_", "facts", "why"),
    [
        ({"batch_invariant": True}, {}, "batch_invariant is for the embedded engine"),
        ({"overlap_comm": True}, {}, "overlap_comm is for the embedded engine"),
        ({"tensor_model_parallel_size": 2}, {}, "ranks of the job share a copy"),
        ({}, {"dtype": "float64"}, "vLLM has no float64"),
        ({}, {"adapters": True}, "adapters merged"),
        ({}, {"episodes": [None, ConstrainedEpisode(accept=lambda text, row: True)]}, "guards and logits processors"),
    ],
)
def test_what_vllm_cannot_do_is_for_the_embedded_engine(
    install: Install, set_: dict[str, Any], facts: dict[str, Any], why: str
) -> None:
    found = choose_engine(RolloutOptions(**set_), "cuda", **facts)
    assert found.name == "embedded" and why in found.why


def test_tools_are_for_vllm_too(install: Install) -> None:
    assert choose_engine(RolloutOptions(), "cuda", episodes=[ToolEpisode([add])]).name == "vllm"


def test_an_actor_says_its_engine_once(gpu: Install, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    actor = verl.Actor(str(tiny))
    assert actor.rollout_options.name == "auto"
    with caplog.at_level(logging.INFO, "verl"):
        assert (actor.resolve_engine(), actor.resolve_engine()) == ("vllm", "vllm")
    assert caplog.text.count("rollout.name=auto: vllm, because the actor is on cuda, and vLLM is installed") == 1
    gpu(False)
    assert actor.resolve_engine() == "vllm"  # it stays
    assert EngineRecipe.of(verl.Actor(str(tiny))).options.name == "embedded"
    assert verl.Actor(str(tiny), rollout="hf").resolve_engine() == "hf"


def test_weights_that_arrive_meanwhile_are_for_a_cpu(gpu: Install, tiny: Path) -> None:
    """On a device they would all arrive first, without a word."""
    for name in ("auto", "embedded"):
        with pytest.raises(ConfigError, match=r"overlap_comm is for ranks on a CPU: on cuda"):
            verl.Actor(str(tiny), rollout=name, overlap_comm=True).resolve_engine()
    assert verl.Actor(str(tiny), overlap_comm=True, placement="cpu").resolve_engine() == "embedded"


def test_an_actor_is_asked_for_what_it_has(gpu: Install, tiny: Path) -> None:
    assert verl.Actor(str(tiny), lora=LoraOptions(r=2)).resolve_engine() == "embedded"
    assert verl.Actor(str(tiny), dtype="float64").resolve_engine() == "embedded"
    actor = verl.Actor(str(tiny))
    actor.set_episode("task", ConstrainedEpisode(accept=lambda text, row: True))
    assert actor.resolve_engine() == "embedded"
    assert verl.Actor(str(tiny), placement="cpu").resolve_engine() == "embedded"


def test_a_layout_of_the_hybrid_engine_is_for_the_embedded_one(gpu: Install, tiny: Path) -> None:
    sized = verl.Actor(str(tiny), placement="cpu")
    sized.controller.device = "cuda"
    with pytest.raises(ConfigError):  # one rank has no such layout
        enable_hybrid_engine(sized, tensor_parallel_size=2)
    assert sized.rollout_options.name == "embedded"
    free = verl.Actor(str(tiny))
    enable_hybrid_engine(free)
    assert free.rollout_options.name == "vllm"


def test_on_a_cpu_nothing_changes(install: Install, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "verl"):
        actor = verl.Actor(str(tiny))
        assert isinstance(actor.group.worker.rollout_engine, EmbeddedEngine)
    assert "rollout.name" not in caplog.text


def config(tmp_path: Path, tiny: Path) -> Config:
    return build_config(settings(tmp_path, tiny, **{"trainer.total_steps": 1, "trainer.eval_every": 1}))


@pytest.mark.parametrize("began", [True, False])
def test_a_run_goes_on_with_the_engine_with_which_it_began(
    gpu: Install, tiny: Path, tmp_path: Path, began: bool
) -> None:
    given, name = config(tmp_path, tiny), "vllm" if began else "embedded"
    for there in (began, not began):  # the second time vLLM has been removed, or added
        gpu(there)
        kept = resolve(given, tmp_path)
        actor = verl.Actor(kept.actor_rollout_ref.model, rollout=kept.actor_rollout_ref.rollout)
        settled = resolve(kept, tmp_path, actor)
        assert (actor.resolve_engine(), settled.actor_rollout_ref.rollout.name) == (name, name)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"dtypes": {}, "engine": "vlm"}'])
def test_a_damaged_record_is_named(tiny: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=FILE):
        resolve(config(tmp_path, tiny), tmp_path)


def test_a_run_keeps_its_engine(install: Install, tiny: Path, tmp_path: Path) -> None:
    train(config(tmp_path, tiny))
    (kept,) = (tmp_path / "runs").glob(f"test*/{FILE}")
    assert json.loads(kept.read_text())["engine"] == "embedded"


def test_a_plan_for_gpus_counts_what_the_run_would_take(gpu: Install, tiny: Path, tmp_path: Path) -> None:
    for there, parts in ((True, {"actor", "vLLM"}), (False, {"actor"})):
        gpu(there)
        found = memory_on(config(tmp_path, tiny), [make_algorithm("reinforce_plus_plus")], Cluster.parse("1xL4"))
        assert found.parts.keys() - {"reference"} == parts


def test_the_dry_run_and_the_doctor_show_it(gpu: Install, tiny: Path, tmp_path: Path) -> None:
    given = config(tmp_path, tiny)
    assert plan(given)["engine"].startswith("embedded (auto: on a GPU vllm, because")
    assert check_engine().detail == "rollout.name=auto is vllm: the actor is on cuda, and vLLM is installed"
    gpu(False)
    assert plan(given)["engine"] == "embedded (auto: on a GPU too, because vLLM is not installed)"
    assert "verl-hybrid[vllm]" in check_engine().advice


def test_an_old_vllm_is_not_taken(gpu: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, name in (("0.11.2", "embedded"), ("0.32.0", "vllm"), ("1.0.0rc1", "vllm")):
        monkeypatch.setattr(choice, "version", lambda package, found=found: found)
        chosen, why = choice.choose_engine(RolloutOptions(), "cuda:0")
        assert chosen == name, why
    monkeypatch.setattr(choice, "version", lambda package: "0.11.2")
    assert "vLLM 0.11.2 is older than 0.32" in choice.choose_engine(RolloutOptions(), "cuda:0").why


def test_with_a_model_runner_that_is_not_served_vllm_is_not_taken(
    gpu: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, name in (("1", "embedded"), ("0", "vllm")):
        monkeypatch.setenv(choice.RUNNER, asked)
        assert choose_engine(RolloutOptions(), "cuda:0").name == name
    monkeypatch.setenv(choice.RUNNER, "1")
    assert "VLLM_USE_V2_MODEL_RUNNER=1 asks vLLM for model runner V2" in choose_engine(RolloutOptions(), "cuda").why
    assert "unset it" in check_engine().detail
