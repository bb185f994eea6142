"""What a trainer takes from a checkpoint: whatever does not pass the schema is damaged, and the one before is taken."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load, save

import verl
from tests.trainer.cases import low_bytes
from verl.checkpoint import state
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.store import Checkpoint
from verl.checkpoint.verify import verify
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.errors import CheckpointError, DamagedCheckpointError, DataError
from verl.trainer.asynchronous import AsyncTrainer
from verl.trainer.evaluation import HeldOut
from verl.weights.shard import checksum

PROMPTS = ["Once upon a time", "In the beginning"]
SHORT = verl.SamplingParams(max_new_tokens=6, ignore_eos=True)
DEEP = b"[" * 200_000 + b"]" * 200_000
WRONG: list[Any] = [None, True, -1, 0.5, 2**70, "x", [["x"]], {"a": {"b": []}}]


def make(path: Path, lr: float = 1e-2, algorithm: str = "ppo", **options: Any) -> verl.Trainer:
    actor = verl.Actor(str(path), optim={"lr": lr}, sampling=SHORT)
    reward = verl.Reward(low_bytes, smoothing=0.5)
    kind = AsyncTrainer if "batch_size" in options else verl.Trainer
    return kind(actor, reward=reward, algorithm=algorithm, n=2, log_dir=False, **options)


def reforge(path: Path, name: str, raw: bytes, **manifest: Any) -> None:
    """Replace a file of a checkpoint, with digests that are right."""
    (path / name).write_bytes(raw)
    content = json.loads((path / "manifest.json").read_text())
    content["files"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
    content |= manifest
    del content["digest"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**content, "digest": digest}, indent=1, sort_keys=True) + "\n")


def replaced(value: Any) -> Iterator[tuple[str, Any]]:
    """Every copy of a JSON value in which one part has become something else, and what was done."""
    for wrong in WRONG:
        yield f" = {wrong!r}", wrong
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for about, part in replaced(value[key]):
            copy = value.copy()
            copy[key] = part
            yield f".{key}{about}", copy


def found(trainer: verl.Trainer, directory: Path) -> Checkpoint:
    checkpoint = CheckpointStore(directory).load(state.identity(trainer), partial(state.check, trainer))
    assert checkpoint is not None
    return checkpoint


@pytest.fixture(scope="module")
def trained(tiny: Path) -> verl.Trainer:
    trainer = make(tiny, held_out=HeldOut(load_prompts(["a", "b", "c"])))
    for _ in range(2):
        trainer.step(PROMPTS)
        trainer.evaluate_held_out()
    return trainer


@pytest.fixture
def saved(trained: verl.Trainer, tmp_path: Path) -> tuple[verl.Trainer, Path]:
    """A trainer after step 2, and its checkpoints of steps 1 and 2."""
    for trained.steps in (1, 2):
        trained.save_checkpoint(tmp_path / f"step-{trained.steps:06d}")
    return trained, tmp_path


@pytest.mark.quick("actor/probe.json-3")
@pytest.mark.parametrize(
    ("name", "every"),
    # An odd number, so that each kind of wrong value is among those that are tried.
    [("trainer.json", 7), ("actor/probe.json", 3)]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in ("trainer.json", "actor/probe.json")],
)
def test_wrong_types_in_json_are_damage_or_harmless(saved: tuple[verl.Trainer, Path], name: str, every: int) -> None:
    trainer, directory = saved
    file = directory / "step-000002" / name
    good = file.read_bytes()
    passed, before = [], checksum(trainer.actor.shards())
    for about, content in islice(replaced(json.loads(good)), 0, None, every):
        reforge(directory / "step-000002", name, json.dumps(content).encode())
        try:
            checkpoint = found(trainer, directory)
        except (CheckpointError, DataError):  # of another optimizer, a reward without smoothing, other held-out data
            assert about.startswith((".tasks", ".roles", ".evaluation.held_out"))
            continue
        if checkpoint.step == 2:
            passed.append(about)
            state.restore(trainer, checkpoint)
            assert trainer.held_out is not None and (trainer.held_out.first is None or trainer.held_out.summary())
    assert checksum(trainer.actor.shards()) == before
    reforge(directory / "step-000002", name, good)
    assert found(trainer, directory).step == 2
    trainer.load_checkpoint(directory / "step-000002")
    trainer.step(PROMPTS)
    # What passes is of the right type.
    assert not [about for about in passed if about.startswith((" =", ".steps", ".skipped", ".roles =", ".outputs ="))]


@pytest.mark.slow
def test_json_that_is_none_is_damage(saved: tuple[verl.Trainer, Path], caplog: pytest.LogCaptureFixture) -> None:
    trainer, directory = saved
    for name in ("trainer.json", "actor/probe.json", "actor/config.json"):
        good = (directory / "step-000002" / name).read_bytes()
        text = json.dumps({**json.loads(good), "x": 1})[:-2]
        for raw in (b"", b"{", b"null", b"\xff", DEEP, f"{text}{DEEP.decode()}}}".encode(), b"9" * 5000, good + b"{}"):
            reforge(directory / "step-000002", name, raw)
            caplog.clear()
            assert found(trainer, directory).step == 1
            assert name in caplog.text and "taking the one before it" in caplog.text
        reforge(directory / "step-000002", name, good)
    assert found(trainer, directory).step == 2


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_damage(
    saved: tuple[verl.Trainer, Path], number: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, directory = saved
    text = (directory / "step-000002" / "trainer.json").read_text()
    for key in ("kl_coef", "mean"):
        value = json.loads(text)["tasks"]["main"]["algorithm" if key == "kl_coef" else "sources"]
        value = value[key] if key == "kl_coef" else value["reward"]["reward"][key]
        assert text.count(f'"{key}": {json.dumps(value)}') == 1
        forged = text.replace(f'"{key}": {json.dumps(value)}', f'"{key}": {number}')
        reforge(directory / "step-000002", "trainer.json", forged.encode())
        assert found(trainer, directory).step == 1
        where = f"{key}: Value error," if key == "kl_coef" else f"Value error, {key}"
        assert where in caplog.text and "is not a finite number" in caplog.text


def test_steps_that_disagree_are_damage(saved: tuple[verl.Trainer, Path], caplog: pytest.LogCaptureFixture) -> None:
    trainer, directory = saved
    content = json.loads((directory / "step-000002" / "trainer.json").read_text())
    for step in (1, 3, -2, True, "2", 2.0):
        reforge(directory / "step-000002", "trainer.json", json.dumps({**content, "steps": step}).encode())
        assert found(trainer, directory).step == 1
    reforge(directory / "step-000002", "trainer.json", json.dumps({**content, "steps": 3}).encode(), step=3)
    assert found(trainer, directory).step == 1
    assert "trainer.json says step 3, the manifest 2" in caplog.text
    assert "manifest.json says step 3" in caplog.text


Change = Callable[[dict[str, torch.Tensor]], None]


def integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()


def halved(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


def wider(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(33)


def fewer(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.extra.weight"] = torch.ones(1)


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("inf")


def forge(saved: tuple[verl.Trainer, Path], role: str, change: Change) -> tuple[verl.Trainer, Path]:
    """The trainer and its latest checkpoint, the tensors of which file are changed, with digests that fit."""
    trainer, directory = saved
    name = f"{role}-0-00001.safetensors"
    tensors = load((directory / "step-000002" / name).read_bytes())
    change(tensors)
    reforge(directory / "step-000002", name, save(tensors))
    assert found(trainer, directory).step == 1
    return trainer, directory / "step-000002"


@pytest.mark.parametrize("change", [integers, halved, wider, fewer, more, infinite])
def test_weights_that_are_not_the_models_or_not_finite_are_damage(
    saved: tuple[verl.Trainer, Path],
    change: Change,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, directory = forge(saved, "actor/weights", change)
    assert "'model." in caplog.text and "taking the one before it" in caplog.text
    assert not verify(directory).ok
    before = checksum(trainer.actor.shards())
    with pytest.raises(DamagedCheckpointError, match=r"step-000002 is damaged: actor/weights: 'model\."):
        trainer.load_checkpoint(directory)
    assert checksum(trainer.actor.shards()) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_damage(saved: tuple[verl.Trainer, Path], value: float) -> None:
    forge(saved, "critic/optimizer", lambda tensors: tensors["score.weight.exp_avg"][0].fill_(value))


def lack(*keys: str, of: str = "") -> Change:
    """The optimizer's tensors without some states, of all weights or of one."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        doomed = [name for name in tensors if name.startswith(of) and name.rpartition(".")[2] in keys]
        assert doomed
        for name in doomed:
            del tensors[name]

    return change


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


FIRST = "model.embed_tokens.weight"


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "change",
    [
        *(lack(key) for key in ("step", "exp_avg", "exp_avg_sq")),
        *(lack(key, of=FIRST) for key in ("step", "exp_avg", "exp_avg_sq")),
        lack("step", "exp_avg", "exp_avg_sq"),
        lack("step", "exp_avg", "exp_avg_sq", of=FIRST),
        *(put(f"{FIRST}.step", torch.tensor(value)) for value in (-1.0, 0.5, 99.0, 1e9)),
        put(f"{FIRST}.step", torch.ones(2)),
        put(f"{FIRST}.momentum", torch.ones(2)),
        lambda tensors: tensors[f"{FIRST}.exp_avg_sq"].neg_(),
    ],
)
def test_an_optimizers_state_that_cannot_be_is_damage(
    saved: tuple[verl.Trainer, Path], change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    _, directory = forge(saved, "actor/optimizer", change)
    assert "step-000002 is damaged: actor/optimizer: " in caplog.text
    assert "actor/optimizer: " in str(verify(directory))


def test_state_of_a_callers_optimizer_is_all_that_was_saved(tiny: Path, tmp_path: Path) -> None:
    trainer = verl.Trainer(
        verl.Actor(str(tiny), optim=partial(torch.optim.SGD, lr=0.1, momentum=0.9), sampling=SHORT),
        reward=low_bytes, algorithm="grpo", n=2, log_dir=False,
    )  # fmt: skip
    for trainer.steps in (1, 2):
        trainer.step(PROMPTS)
        trainer.save_checkpoint(tmp_path / f"step-{trainer.steps:06d}")
    newest = sorted(tmp_path.iterdir())[-1]
    assert found(trainer, tmp_path).step == trainer.steps
    name = "actor/optimizer-0-00001.safetensors"
    tensors = load((newest / name).read_bytes())
    lack("momentum_buffer", of=FIRST)(tensors)
    reforge(newest, name, save(tensors))
    assert found(trainer, tmp_path).step < trainer.steps


@pytest.mark.parametrize("numpy", [("MT19937", 10**9, 0, 0.0), ("MT19937", -1, 0, 0.0), ("MT19937", 5, 7, 0.0)])
def test_generators_that_cannot_be_are_damage(saved: tuple[verl.Trainer, Path], numpy: tuple[object, ...]) -> None:
    trainer, directory = saved
    content = json.loads((directory / "step-000002" / "trainer.json").read_bytes())
    content["random"]["numpy"] = numpy
    reforge(directory / "step-000002", "trainer.json", json.dumps(content).encode())
    assert found(trainer, directory).step == 1
    assert "random.numpy" in str(verify(directory / "step-000002"))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("wrong", ["7", None, True, 0.5, -1, 10**6, 2**70])
@pytest.mark.parametrize("key", ["epoch", "position"])
def test_a_position_that_is_none_is_damage_and_one_of_other_data_is_refused(
    saved: tuple[verl.Trainer, Path], key: str, wrong: object
) -> None:
    trainer, directory = saved
    loader = PromptLoader(load_prompts(PROMPTS), 2)
    next(loader)
    good = loader.state_dict()
    file = directory / "step-000002" / "trainer.json"
    content = json.loads(file.read_bytes())

    def resumed(position: dict[str, Any]) -> int:
        reforge(file.parent, file.name, json.dumps({**content, "position": position}).encode())
        check = partial(state.check, trainer, data=loader)
        checkpoint = CheckpointStore(directory).load(state.identity(trainer), check)
        assert checkpoint is not None and loader.state_dict() == good
        return checkpoint.step

    assert resumed(good) == 2
    if (key, wrong) != ("epoch", 10**6):  # an epoch may be any
        assert resumed({**good, key: wrong}) == 1
    with pytest.raises(DataError, match="belongs to other data"):
        resumed({**good, "digest": "x"})


def test_a_copy_under_a_name_like_a_checkpoints_is_passed_over(
    saved: tuple[verl.Trainer, Path], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, directory = saved
    for name in ("step-0000099", "step-0000002", "step-9999999"):
        shutil.copytree(directory / "step-000002", directory / name)
    store = CheckpointStore(directory, keep=1)
    assert store.steps() == [1, 2, 9999999]
    assert found(trainer, directory).step == 2
    for name in ("step-0000099", "step-0000002", "step-9999999"):
        assert name in caplog.text
    store.rollback(1)
    assert sorted(p.name for p in directory.glob("step-*")) == ["step-0000002", "step-000001", "step-0000099"]


def test_malformed_tables_and_generators_are_damage(saved: tuple[verl.Trainer, Path]) -> None:
    trainer, directory = saved
    for name, raw in {
        "buffer.parquet": b"PAR1 and no more PAR1",
        "random-00001.safetensors": save({"torch": torch.zeros(3, dtype=torch.uint8)}),
    }.items():
        good = (directory / "step-000002" / name).read_bytes()
        before = torch.get_rng_state()
        reforge(directory / "step-000002", name, raw)
        assert found(trainer, directory).step == 1
        assert torch.equal(torch.get_rng_state(), before)
        reforge(directory / "step-000002", name, good)


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"x": [1, 2]}, "its samples lack group, prompt_tokens, response_tokens"),
        ({"group": ["a"], "prompt_tokens": [[1]], "response_tokens": ["b"]}, "cannot be stored"),
        (
            {"group": ["a"], "prompt_tokens": [[1]], "response_tokens": [[1, 2]], "response_mask": [[1]]},
            "response_mask is not as long as response_tokens",
        ),
    ],
)
def test_a_buffer_that_holds_no_samples_is_damage(
    saved: tuple[verl.Trainer, Path], table: dict[str, Any], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, directory = saved
    pq.write_table(pa.table(table), directory / "table")
    reforge(directory / "step-000002", "buffer.parquet", (directory / "table").read_bytes())
    (directory / "table").unlink()
    assert found(trainer, directory).step == 1
    assert "buffer.parquet" in caplog.text and fault in caplog.text


def test_wrong_types_in_the_schedule_of_asynchronous_training_are_damage(tiny: Path, tmp_path: Path) -> None:
    trainer = make(tiny, algorithm="grpo", batch_size=2)
    for trainer.steps in (1, 2):
        trainer.save_checkpoint(tmp_path / f"step-{trainer.steps:06d}")
    good = json.loads((tmp_path / "step-000002" / "schedule.json").read_text())
    for about, content in replaced(good):
        reforge(tmp_path / "step-000002", "schedule.json", json.dumps(content).encode())
        assert found(trainer, tmp_path).step == (2 if about == ".began = {}" else 1), about
    reforge(tmp_path / "step-000002", "schedule.json", DEEP)
    assert found(trainer, tmp_path).step == 1


def test_training_that_diverges_never_commits_a_checkpoint(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = make(tiny, algorithm="grpo", checkpoint_dir=tmp_path, save_every=1)
    good.step(PROMPTS)
    diverging = make(tiny, 1e38, algorithm="grpo", checkpoint_dir=tmp_path, save_every=1)
    diverging.load_checkpoint(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match=r"step-000002 was not saved: actor/weights: .* not finite"):
        diverging.step(PROMPTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert found(good, tmp_path).step == 1


def test_the_reference_is_hashed_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr("verl.roles.reference.checksum", lambda shards: hashed.append(1) or checksum(shards))
    trainer = make(tiny, algorithm="grpo", kl_coef=0.1, kl_in="loss")
    trainer.step(PROMPTS)
    assert trainer.actor.reference.model is not None
    first = state.identity(trainer)
    assert state.identity(trainer) == first
    assert first["reference.sha256"] == checksum(make(tiny).actor.shards())
    assert len(hashed) == 1


def test_an_algorithm_that_keeps_no_number_is_damage(saved: tuple[verl.Trainer, Path]) -> None:
    trainer, directory = saved
    content = json.loads((directory / "step-000002" / "trainer.json").read_text())
    for algorithm in ({"kl_coef": "high"}, {"kl_coef": "0.5"}, {"kl_coef": [0.5]}, {"kl_coef": None}, {}):
        forged = {**content, "tasks": {"main": {**content["tasks"]["main"], "algorithm": algorithm}}}
        reforge(directory / "step-000002", "trainer.json", json.dumps(forged).encode())
        assert found(trainer, directory).step == 1
        assert trainer.algorithm.state_dict()["kl_coef"] > 0


def test_lists_of_an_algorithm_hold_numbers() -> None:
    algorithm = verl.algorithms.make_algorithm("safe_rlhf")
    state = algorithm.state_dict()
    for costs in (["high"], 0.5, None, [[1.0]], {"a": 1.0}):
        with pytest.raises(ValueError, match="the state 'costs' of algorithm 'safe_rlhf' must be numbers"):
            algorithm.load_state_dict({**state, "costs": costs})
    algorithm.load_state_dict({**state, "costs": [1.0, 2], "batches": 3})
    assert algorithm.state_dict() == {**state, "costs": [1.0, 2], "batches": 3}


def test_a_reward_that_keeps_no_number_is_damage(saved: tuple[verl.Trainer, Path]) -> None:
    trainer, directory = saved
    content = json.loads((directory / "step-000002" / "trainer.json").read_text())
    for mean in ("high", [], {}, [0.5]):
        task = {**content["tasks"]["main"], "sources": {"reward": {"reward": {"mean": mean}}}}
        forged = {**content, "tasks": {"main": task}}
        reforge(directory / "step-000002", "trainer.json", json.dumps(forged).encode())
        assert found(trainer, directory).step == 1
        assert trainer.sources["reward"].state_dict()["reward"]["mean"] is not None
