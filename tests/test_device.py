"""Devices: the default is the accelerator where there is one, and its memory is its own, not the host's.

There is none here: torch's interface to them is answered by `Fake`, whose device is torch's "meta", on which models can
be put anywhere.
"""

from __future__ import annotations

import json
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
from benchmarks import calibrate
from verl._host import device
from verl._host.device import free_memory, peak_memory
from verl.algorithms import make_algorithm
from verl.checkpoint.state import rng_state, set_rng_state
from verl.cli.doctor import check_devices, check_space
from verl.cluster.controller import Controller
from verl.cluster.placement import DeviceMesh
from verl.config import build_config
from verl.errors import ConfigError, ModelError
from verl.models.loading import load_model, load_tokenizer
from verl.models.packed import PackedModel
from verl.planner.hardware import sheet_of
from verl.roles.layouts import generation_seconds
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.options import SamplerOptions
from verl.rollout.vllm.engine import VLLMEngine
from verl.run import build
from verl.run.memory import check_memory
from verl.run.train import train
from verl.workers.actor import make_rollout_engine
from verl.workers.standalone import EngineRecipe


class Fake:
    """`torch.accelerator` of a machine with so many devices of a kind."""

    def __init__(self, kind: str = "meta", count: int = 2, free: int = 3 << 30) -> None:
        self.kind, self.count, self.free = kind, count, free

    def is_available(self) -> bool:
        return self.count > 0

    def current_accelerator(self) -> torch.device:
        return torch.device(self.kind)

    def device_count(self) -> int:
        return self.count

    def get_memory_info(self, name: str) -> tuple[int, int]:
        assert name.startswith(self.kind)
        return self.free, 80 << 30

    def memory_reserved(self, name: str) -> int:
        return 5 << 20

    def memory_allocated(self, name: str) -> int:
        return 2 << 20

    def max_memory_allocated(self, name: str) -> int:
        return 7 << 20

    def synchronize(self) -> None:
        """Nothing runs beside the host."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    there = Fake()
    monkeypatch.setattr(device, "_accelerators", lambda: there)
    monkeypatch.setattr("verl.cluster.controller._known", {})
    monkeypatch.setitem(__import__("verl.cluster.placement", fromlist=["_KINDS"])._KINDS, "meta", "meta")
    return there


@pytest.fixture
def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory is not asked about."""

    def host() -> int:
        raise AssertionError("the host was asked about a device's memory")

    monkeypatch.setattr(device, "_free_on_host", host)
    monkeypatch.setattr(device, "_peak_on_host", host)


def test_the_machine_is_asked() -> None:
    assert 10e6 < free_memory("cpu") < 1e15
    before = peak_memory("cpu")
    block = torch.ones(50_000_000)
    assert peak_memory("cpu") >= before + 0.5 * block.nbytes or peak_memory("cpu") > 2 * block.nbytes


def test_the_host_stands_for_no_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_accelerators", lambda: Fake(count=0))
    for question in (free_memory, peak_memory, device.total_memory):
        with pytest.raises(ConfigError, match="no device 'cuda:1' here"):
            question("cuda:1")
    with pytest.raises(ConfigError, match="of an accelerator"):
        device.total_memory("cpu")
    assert device.device_name("cuda:1") == "cuda:1" and not device.is_here("cuda:1") and device.is_here("cpu")


def test_cgroup_files(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 50000\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert list(device._limit(tmp_path, *names)) == [(1000000, 250000)]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(device._limit(tmp_path, *names)) == []
    assert list(device._limit(tmp_path / "nowhere", *names)) == []


def test_import_without_torch() -> None:
    code = "import sys, verl._host.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_an_accelerator_the_default_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_accelerators", lambda: Fake(count=0))
    assert (device.accelerator(), device.default_kind(), device.count("cuda")) == (None, "cpu", 0)
    assert str(Controller().mesh.devices[0]) == "cpu:0"


def test_a_kind_without_fp64_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_accelerators", lambda: Fake("mps", 1))
    assert (device.accelerator(), device.default_kind(), device.count("mps")) == ("mps", "cpu", 1)


def test_a_plain_script_runs_on_the_accelerator(fake: Fake, tiny: Path) -> None:
    for handle in (verl.Actor(str(tiny)), verl.Critic.from_pretrained(str(tiny))):
        assert handle.controller.device == "meta"
        with pytest.raises(ModelError, match="on the meta device"):  # as far as a device without memory goes
            handle.group.worker  # noqa: B018
        assert device.of(handle.model) == "meta"
    assert [str(device) for device in DeviceMesh({"actor": 2}).devices] == ["meta:0", "meta:1"]
    assert device.of(verl.Actor(str(tiny), placement="cpu").group.worker.engine.model) == "cpu"


def test_a_model_that_is_on_such_a_device_stays_there(fake: Fake) -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    assert device.put(model) is model
    assert device.of(device.put(torch.nn.Linear(2, 2))) == "meta"
    assert device.of(device.put(torch.nn.Linear(2, 2), "cpu")) == "cpu"


def test_memory_is_that_of_the_device(fake: Fake) -> None:
    assert free_memory("meta:1") == (3 << 30) + (3 << 20)
    assert device.total_memory("meta:1") == 80 << 30
    assert peak_memory("meta:1") == 7 << 20
    assert free_memory("cpu") > 10e6 and peak_memory("cpu") > 10 << 20


@pytest.mark.usefixtures("no_host")
@pytest.mark.parametrize("loaded", [False, True])
def test_a_run_is_refused_by_what_the_device_has(fake: Fake, tiny: Path, loaded: bool) -> None:
    config = build_config({"actor_rollout_ref": {"model": {"path": str(tiny)}}})
    algorithm = make_algorithm("gpg")
    actor = build.build_actor(config, algorithm.head, 8)
    weights = sum(weight.nbytes for weight in actor.model.parameters())
    check_memory(config, [algorithm], actor)
    if loaded:
        device.put(actor.model)
    fake.free = 100_000 if loaded else 100_000 + weights
    room = 100_000 + (3 << 20) + weights
    with pytest.raises(ConfigError, match=f"training needs .* and {room / 1e9:.2f} GB are there"):
        check_memory(config, [algorithm], actor)


def test_memory_of_devices_that_the_driver_does_not_see_is_not_checked(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = build_config({"actor_rollout_ref": {"model": {"path": str(tiny)}}})
    actor = build.build_actor(config, "lm", 8)
    monkeypatch.setattr(actor.controller, "device", "cuda:0")
    with caplog.at_level(logging.INFO, "verl"):
        check_memory(config, [make_algorithm("gpg")], actor)
    assert "memory is not checked: this process sees no 'cuda:0'" in caplog.text


@pytest.mark.usefixtures("no_host")
def test_the_doctor_shows_the_devices(fake: Fake) -> None:
    assert check_space().detail.startswith("3.2 GB of memory on meta:0, ")
    found = check_devices()
    assert found.detail == "meta:0 (80 GiB), meta:1 (80 GiB); a run's default: meta"


class Generators:
    """`torch.cuda` of a machine, as far as names and random generators go."""

    def __init__(self, count: int, kind: str = "cuda") -> None:
        self.states = {f"{kind}:{i}": torch.full((4,), i, dtype=torch.uint8) for i in range(count)}

    def get_device_name(self, name: str) -> str:
        return f"Accelerator {name}"

    def get_rng_state(self, name: str) -> torch.Tensor:
        return self.states[name].clone()

    def set_rng_state(self, state: torch.Tensor, device: str) -> None:
        self.states[device] = state


def test_random_generators_of_all_devices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Generators(2)
    monkeypatch.setattr(device, "_accelerators", lambda: Fake("cuda", len(there.states)))
    monkeypatch.setattr(device, "_module", lambda name: there)
    tensors, meta = rng_state()
    assert device.device_name("cuda:1") == "Accelerator cuda:1" and device.device_name("cpu") == "cpu"
    assert {name: tensors[name][0].item() for name in there.states} == {"cuda:0": 0, "cuda:1": 1}
    there = Generators(1)  # the run goes on with one device less
    there.states["cuda:0"] += 7
    set_rng_state(tensors, meta)
    assert {name: state.tolist() for name, state in there.states.items()} == {"cuda:0": [0] * 4}


def test_a_mac_has_one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.tensor([5], dtype=torch.uint8)

    class Mac:
        def get_rng_state(self) -> torch.Tensor:
            return state

        def set_rng_state(self, new: torch.Tensor) -> None:
            state.copy_(new)

    monkeypatch.setattr(device, "_accelerators", lambda: Fake("mps", 1))
    monkeypatch.setattr(device, "_module", lambda name: Mac())
    ((read, write),) = device.generators().values()
    kept = read().clone()
    state.zero_()
    write(kept)
    assert state.item() == 5 and device.device_name("mps") == "mps"


def test_a_worker_has_the_device_that_its_process_sees(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr(device, "_accelerators", lambda: Fake("cuda", 4))
    monkeypatch.setattr("verl.cluster.controller._known", {})
    assert EngineRecipe.of(verl.Actor(str(tiny), placement="cpu")).device == "cpu"
    actor = verl.Actor(str(tiny), placement="cuda:3")
    assert actor.device == "cuda:3"
    assert EngineRecipe.of(actor).device == "cuda"  # of which a process with one device has number 0


@pytest.mark.usefixtures("no_host")
def test_a_layout_is_chosen_by_the_devices_memory_before_the_model_is_there(fake: Fake, tiny: Path) -> None:
    actor = verl.Actor(str(tiny))
    assert (actor.device, device.of(actor.model)) == ("meta", "cpu")
    actor.controller.transport.devices_a_machine = 2
    layout = replace(actor.controller.meshes("actor", actor.train_options)["train"].layout, shard=2)
    assert generation_seconds(actor, layout, (1, 2), 2).keys() == {1, 2}
    fake.free = -(3 << 20)  # nothing, with what torch holds for the next tensor
    assert generation_seconds(actor, layout, (1, 2), 2) == {}


@pytest.mark.parametrize("free", [1 << 20, 3 << 20])
@pytest.mark.usefixtures("no_host")
def test_a_kv_cache_is_of_the_device_not_the_host(fake: Fake, tiny: Path, free: int) -> None:
    packed = PackedModel(load_model(str(tiny)))
    fake.kind, fake.free = "cpu", free  # an accelerator on which the engine can run
    cache = EmbeddedEngine(packed, eos_token_ids=(0,), seed=0, max_batch=4096).cache
    room = (free + (3 << 20)) // 2
    assert room - cache.nbytes / cache.num_blocks < cache.nbytes <= room
    assert peak_memory(packed.device) == 7 << 20


@pytest.fixture
def vllm(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A build of vLLM for the accelerator; what engines are made with."""
    made: list[dict[str, Any]] = []
    config = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False)))

    def llm(**options: Any) -> Any:
        made.append(options)
        if fake.free < (80 << 30) * options.get("gpu_memory_utilization", 0.92):
            raise ValueError("Free memory on device on startup is less than desired GPU memory utilization")
        return SimpleNamespace(llm_engine=config, collective_rpc=lambda name: [{"scaled": True, "version": None}])

    class Platform:
        @property
        def device_type(self) -> str:
            return fake.kind

        def is_cpu(self) -> bool:
            return False

        is_sleep_mode_available = is_cpu

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=Platform()))
    return made


@pytest.mark.parametrize("place", ["device", "host", "worker"])
@pytest.mark.usefixtures("no_host")
def test_vllms_share_is_of_the_device_that_it_computes_on(
    fake: Fake, tiny: Path, vllm: list[dict[str, Any]], place: str
) -> None:
    """Wherever the model is that it is made from; also in a worker's process of asynchronous training."""
    fake.free = 9 << 20
    if place != "host":
        fake.kind = "cpu"  # an accelerator on which a model can be
    options = SamplerOptions(name="vllm", max_num_seqs=4096)
    if place == "worker":
        EngineRecipe.of(verl.Actor(str(tiny), rollout="vllm", max_num_seqs=4096)).make()
    else:
        make_rollout_engine(PackedModel(load_model(str(tiny))), load_tokenizer(str(tiny)), (0,), options)
    assert vllm[0]["kv_cache_memory_bytes"] == ((9 << 20) + (3 << 20)) // 4


@pytest.mark.usefixtures("fake")
def test_vllm_of_one_rank_stands_on_the_ranks_own_device(tiny: Path, vllm: list[dict[str, Any]]) -> None:
    for where, ranks in (("meta:1", 1), ("meta:1", 2), ("meta", 1)):
        VLLMEngine(
            load_model(str(tiny)), load_tokenizer(str(tiny)), eos_token_ids=(0,), seed=0, device=where,
            tensor_parallel_size=ranks,
        )  # fmt: skip
    assert [made.get("device_ids") for made in vllm] == [[1], None, None]


def test_vllm_starts_beside_a_trainer_that_holds_most_of_the_memory(
    fake: Fake, tiny: Path, vllm: list[dict[str, Any]]
) -> None:
    """It wants a part of the memory to be free, of all devices that it is to use."""
    free = {"meta:0": 40 << 30, "meta:1": 3 << 30}
    fake.get_memory_info = lambda name: (free[name], 80 << 30)  # type: ignore[method-assign]
    for where, ranks in (("meta:0", 1), ("meta:1", 1), ("meta:1", 2)):
        fake.free = free["meta:0" if where == "meta:0" else "meta:1"]
        VLLMEngine(
            load_model(str(tiny)), load_tokenizer(str(tiny)), eos_token_ids=(0,), seed=0, device=where,
            tensor_parallel_size=ranks,
        )  # fmt: skip
    assert [made["gpu_memory_utilization"] for made in vllm] == pytest.approx([0.45, 0.03375, 0.03375])


def test_vllm_leaves_the_random_generators_of_devices_as_they_were(
    fake: Fake, tiny: Path, vllm: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Generators(2, "meta")
    monkeypatch.setattr(device, "_module", lambda name: there)
    start = sys.modules["vllm"].LLM

    def seeds(**options: Any) -> Any:
        for state in there.states.values():
            state.fill_(options["seed"])
        return start(**options)

    monkeypatch.setattr(sys.modules["vllm"], "LLM", seeds)
    VLLMEngine(load_model(str(tiny)), load_tokenizer(str(tiny)), eos_token_ids=(0,), seed=9)
    assert [state[0].item() for state in there.states.values()] == [0, 1]


class Named:
    """`torch.cuda` of a machine, as far as the name of a device goes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_device_name(self, where: str) -> str:
        return self.name


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "Accelerator 7"])
@pytest.mark.usefixtures("no_host")
def test_a_calibration_is_of_the_accelerator(fake: Fake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    places, linked = [], []

    def product(x: torch.Tensor, w: torch.Tensor) -> None:
        places.append((x.device.type, w.device.type, x.dtype))

    def link(megabytes: int, kind: str) -> float:
        linked.append(kind)
        return 1e9

    monkeypatch.setattr(device, "_module", lambda where: Named(name))
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(calibrate, "_collective", link)
    measured = calibrate.measure()
    assert set(places) == {("meta", "meta", torch.bfloat16)} and linked == ["meta"]
    assert (measured.kind, measured.network) == (name, 1e9) and measured.host is not None
    sheet, shares = sheet_of(name), measured.efficiency
    if sheet is None:
        assert shares is None
    else:
        assert sheet.name == {"H": "H100", "A": "A100-40"}[name[7]]
        assert shares is not None and shares.network == 1e9 / sheet.link


@pytest.mark.usefixtures("no_host")
def test_the_figures_of_a_run_are_of_the_device(fake: Fake, tiny: Path, tmp_path: Path) -> None:
    fake.kind = "cpu"  # an accelerator on which a run can compute
    settings = {
        "actor_rollout_ref": {
            "model": {"path": str(tiny)},
            "rollout": {"n": 2, "max_new_tokens": 4, "max_num_seqs": 4},
        },
        "data": {"train": {"task": "chain_sum", "size": 8}, "batch_size": 2},
        "reward": {"name": "task"},
        "trainer": {"total_steps": 1, "output_dir": str(tmp_path)},
    }
    summary = train(build_config(settings))
    run = tmp_path / "latest"
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert summary["peak_memory_bytes"] == 7 << 20 and row["memory/peak_gb"] == (7 << 20) / 1e9
    assert "0.01 GB" in (run / "report.html").read_text()
