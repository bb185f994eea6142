"""`verl train --dry-run --device`: recipes for GPUs fit, in numbers that can be checked by hand, none of the host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import forked
from verl._host import device
from verl.algorithms import make_algorithm
from verl.config import Config, load_config
from verl.errors import ConfigError
from verl.planner.hardware import Cluster
from verl.run.memory import DeviceMemory, memory_on

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "grpo_qwen2.5-0.5b": ("qwen2.5-0.5b", "1xL4"),
    "grpo_qwen2.5-7b": ("qwen2.5-7b", "8xH100-80GB"),
    "ppo_llama-3-8b": ("llama-3-8b", "8xH100-80GB"),
    "dpo_lora_qwen2.5-7b": ("qwen2.5-7b", "1xA100-40GB"),
}
#: Weights of the published models.
PARAMETERS = {"qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "llama-3-8b": 8_030_261_248}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations of the published models, without weights."""
    folder = tmp_path_factory.mktemp("shapes")
    for shape in PARAMETERS:
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "made_model.py"),
            shape,
            str(folder / shape),
            "--config-only",
        ]
        forked.run(command, check=True, timeout=200)
    return folder


def of(config: Config, devices: str) -> DeviceMemory:
    return memory_on(
        config, [make_algorithm(config.algorithm.name, **config.algorithm.options)], Cluster.parse(devices)
    )


def recipe(name: str, shapes: Path, *overrides: str) -> Config:
    model = f"actor_rollout_ref.model.path={shapes / RECIPES[name][0]}"
    return load_config(ROOT / "examples" / "gpu" / f"{name}.yaml", [model, *overrides])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_devices_whatever_the_host_has(
    name: str, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_free_on_host", lambda: pytest.fail("the memory of the host was asked for"))
    shape, devices = RECIPES[name]
    found = of(recipe(name, shapes), devices)
    adapters = 40e6 if "lora" in name else 0  # 16 ranks of every linear layer, about 0.5 % of the weights
    kept = found.parts["actor"].kept
    assert (kept["generation"] or kept["weights"]) == pytest.approx(
        2 * PARAMETERS[shape] + 2 * adapters, abs=adapters * 0.2 + 1
    )
    assert found.total <= found.cluster.device.memory
    assert list(found.lines())[-1].endswith("fits")


def test_eight_ranks_cut_the_training_state_and_the_reference(shapes: Path) -> None:
    found = of(recipe("grpo_qwen2.5-7b", shapes), "8xH100-80GB")
    weights = PARAMETERS["qwen2.5-7b"]
    kept = found.parts["actor"].kept
    assert (kept["weights"], kept["gradients"], kept["generation"]) == (weights * 4 / 8, weights * 4 / 8, weights * 2)
    assert found.parts["reference"].peak == weights * 2 / 8
    assert found.kv_cache == pytest.approx(16 * 2**30, rel=1e-4)


def test_a_reference_that_evaluations_alone_read_is_counted(shapes: Path) -> None:
    without, with_kl = (
        of(recipe("grpo_qwen2.5-0.5b", shapes, *more), "1xL4").parts for more in ([], ["trainer.eval_metrics=[kl]"])
    )
    assert with_kl.keys() - without.keys() == {"reference"}
    assert with_kl["reference"].peak == PARAMETERS["qwen2.5-0.5b"] * 2


def test_what_does_not_fit_is_refused_with_the_setting_to_change(shapes: Path) -> None:
    far = recipe("grpo_qwen2.5-7b", shapes, "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    with pytest.raises(ConfigError, match=r"set actor_rollout_ref.actor.max_tokens_per_micro_batch=\d+ \(now 16384\)"):
        of(far, "8xH100-80GB")
    with pytest.raises(ConfigError, match="no micro-batch is small enough"):
        of(recipe("grpo_qwen2.5-7b", shapes), "8xL4")


def test_a_role_elsewhere_takes_nothing_here(shapes: Path) -> None:
    where = "trainer.placement={actor: 'cuda:0-3', reference: 'cuda:4', rollout: 'cuda:5-7'}"
    found = of(recipe("grpo_qwen2.5-7b", shapes, where), "8xH100-80GB")
    assert list(found.parts) == ["actor"] and found.kv_cache == 0
    with pytest.raises(ConfigError, match="has actor on 4 devices, and 1 x 2 H100 are given"):
        of(recipe("grpo_qwen2.5-7b", shapes, where), "2xH100")


def test_weights_in_int4_are_not_modelled(shapes: Path) -> None:
    with pytest.raises(ConfigError, match="int4 is not modelled"):
        of(recipe("dpo_lora_qwen2.5-7b", shapes, "actor_rollout_ref.model.dtype=int4"), "1xL4")


def test_a_name_may_end_with_the_memory() -> None:
    memory = {
        name: Cluster.parse(f"1x{name}").device.memory for name in ("H100", "H100-94GB", "A100-40GB", "a100-40", "A100")
    }
    assert memory == {"H100": 80e9, "H100-94GB": 94e9, "A100-40GB": 40e9, "a100-40": 40e9, "A100": 80e9}
    with pytest.raises(ConfigError, match="--device: no data sheet of 'H1000': did you mean 'h100'"):
        Cluster.parse("1xH1000", option="--device")


def test_the_command(tiny: Path) -> None:
    settings = [f"actor_rollout_ref.model.path={tiny}", "data.train={task: chain_sum, size: 64}", "reward.name=task"]
    command = [sys.executable, "-m", "verl", "train", *settings, "--device", "H100-80GB"]
    done = forked.run([*command, "--dry-run"], timeout=200)
    assert done.returncode == 0, done.stderr
    assert "1 x 1 H100-80GB, 80 GB each" in done.stdout and "of 80.0: fits\n" in done.stdout
    done = forked.run(command, timeout=200)
    assert done.returncode == 2 and "give --dry-run too" in done.stderr


def test_a_task_whose_problems_end_with_its_size_has_splits() -> None:
    from verl.data.tasks import task_rows

    rows = {
        split: [row["question"] for row in task_rows({"task": "gsm_symbolic", "split": split, "size": 30})]
        for split in ("train", "eval")
    }
    assert len(rows["train"]) == len(set(rows["eval"])) == 30
    assert not set(rows["train"]) & set(rows["eval"])
