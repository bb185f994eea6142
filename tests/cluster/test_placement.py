"""The map of placement in all its forms, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import verl
from verl.cluster.placement import Device
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ("cuda:0-3", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cpu:2,0", ["cpu:0", "cpu:2"]),
        ("gpu:1", ["cuda:1"]),
        ("cpu", ["cpu:0"]),
        (["cpu:0", "cpu:3"], ["cpu:0", "cpu:3"]),
        ({"gpu_ids": [0, 1], "parallel": "data"}, ["cuda:0", "cuda:1"]),
        ({"device": "cuda:4"}, ["cuda:4"]),
        (verl.ResourcePool("cpu:1"), ["cpu:1"]),
    ],
)
def test_every_form_names_its_slots(given: Any, devices: list[str]) -> None:
    assert [str(device) for device in verl.ResourcePool.parse(given).devices] == devices
    assert [str(device) for device in verl.DeviceMesh({"actor": given}).devices] == devices
    assert [str(device) for device in verl.DeviceMesh(given).pool("critic").devices] == devices


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"actr": "cpu:0"}, "did you mean 'actor'"),
        ({"actor": {"gpu_id": [0]}}, "did you mean 'gpu_ids'"),
        ({"actor": {"gpu_ids": [0], "device": "cpu"}}, "give one of"),
        ({"actor": {"gpu_ids": [0, 1], "parallel": "tensr"}}, "did you mean 'tensor'"),
        ("cpu:0,0", "cpu:0 is named twice"),
        ("cpu:3-1", "no range"),
        ("cpu:0-100000", "'cpu:0-100000' names 100001 devices, and a job has at most 16384"),
        (["cpu:0-9999", "cpu:10000-19999"], "names 20000 devices"),
        ({"actor": 10**12}, "names 1000000000000 devices"),
        (f"cpu:0-{'9' * 5000}", "has a number of a device that no machine has"),
        ("first gpu", "no device"),
        ([], "at least one device"),
        ({"actor": 0}, "at least one device, not 0"),
        ({}, "it is empty: name at least"),
        (["cpu:0", "cuda:0"], "one kind of device"),
        ("cdua:0-1", r"no kind of device 'cdua': did you mean 'cuda'"),
        ({"actor": "tpu:0"}, "no kind of device 'tpu'"),
        ([Device("npu", 0)], "no kind of device 'npu'"),
        ("mps:0-1", "a Mac has one device, 'mps:0'"),
        ({"cpu_ids": "0-1"}, r"cpu_ids are numbers .*, not '0-1'"),
        ({"actor": {"gpu_ids": [-1, 0]}}, r"gpu_ids are numbers .*, not \[-1, 0\]"),
        ({"cpu_ids": [0.7]}, "cpu_ids are numbers"),
        ({"cpu_ids": [True]}, "cpu_ids are numbers"),
        ({"cpu_ids": {"a": 1}}, "cpu_ids are numbers"),
        ({"cpu_ids": [None]}, "cpu_ids are numbers"),
        ({"actor": True}, "give devices such as .*, not True"),
        ({"actor": "cpu:0-2", "rollout": "cpu:2-3"}, r"'actor' \(3 devices: .*'rollout' \(2 .* overlap in 1"),
    ],
)
def test_a_map_that_cannot_be_met_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verl.DeviceMesh(given)


def test_missing_slots_are_told_with_their_numbers() -> None:
    mesh = verl.DeviceMesh({"actor": "cuda:0-1", "critic": "cuda:5"})
    mesh.check({"cuda": 6}, "the job")
    with pytest.raises(
        ConfigError, match=r"'critic' asks for device cuda:5 .* the job has 4 cuda devices \(cuda:0-3\)"
    ):
        mesh.check({"cuda": 4}, "the job")


def test_the_picture() -> None:
    picture = str(verl.DeviceMesh({"actor": "cpu:0-1", "critic": "cpu:2"}))
    assert picture.splitlines() == [
        "       actor  critic",
        "cpu:0  0/2    ·",
        "cpu:1  1/2    ·",
        "cpu:2  ·      0/1",
    ]


def test_numbers_take_the_next_free_slots() -> None:
    mesh = verl.DeviceMesh({"rollout": 2, "actor": 1, "critic": "cpu:2", "reference": 1})
    assert [[device.index for device in pool.devices] for pool in mesh.pools.values()] == [[0, 1], [2], [2], [3]]


def test_a_trainer_places_its_handles(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=2))
    with pytest.raises(ConfigError, match="one kind"):
        verl.Trainer(actor, reward_fn=len, device_map={"actor": "cpu:0-1", "critic": "cuda:0"})
    trainer = verl.Trainer(
        actor, reward_fn=lambda texts: [1.0] * len(texts), algorithm="ppo", placement="cpu:0", log_dir=False
    )
    assert trainer.critic is not None and trainer.critic.controller is actor.controller
    trainer.step(["a"])
    with pytest.raises(ConfigError, match="before the first call"):
        actor.set_placement("cpu:0")
