import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as safetensors

from verl._base.schemas import CHECKPOINT
from verl.batch import Batch
from verl.checkpoint.directory import CheckpointStore
from verl.checkpoint.schema import RandomState
from verl.checkpoint.state import rng_state, set_rng_state
from verl.checkpoint.store import load_checkpoint, model_identity, save_checkpoint
from verl.checkpoint.verify import verify
from verl.errors import CheckpointError, DamagedCheckpointError
from verl.weights import tensor_files
from verl.weights.shard import Shard

IDENTITY = {"actor.architecture": "LlamaForCausalLM", "actor.shapes": "ab12", "config": "cafe"}


def weights(step: int) -> Iterator[Shard]:
    generator = torch.Generator().manual_seed(step)
    yield Shard.whole("model.embed.weight", torch.randn(7, 3, generator=generator).bfloat16())
    yield Shard.whole("model.norm.weight", torch.randn(3, generator=generator))
    yield Shard.whole("lm_head.weight", torch.randn(3, 7, generator=generator).double().t())


def contents(step: int) -> dict[str, object]:
    return {
        "actor/weights": lambda: [*weights(step)],
        "actor/optimizer": {"model.norm.weight.exp_avg": torch.full((3,), float(step)), "count": torch.tensor(step)},
        "trainer.json": {"step": step, "kl_coef": 0.1 + step, "seeds": [1, 2]},
        "buffer.parquet": Batch.from_columns(
            {"id": ["a", "b"], "response_tokens": [[1], [2, step]], "reward": [None, 0.5]}
        ),
    }


def assert_holds(checkpoint: object, step: int) -> None:
    assert checkpoint.step == step
    for got, want in zip(
        sorted(checkpoint.shards("actor/weights"), key=name), sorted(weights(step), key=name), strict=True
    ):
        assert (got.name, got.global_shape, got.offset) == (want.name, want.global_shape, want.offset)
        assert got.tensor.dtype == want.tensor.dtype
        assert torch.equal(got.tensor, want.tensor)
    assert checkpoint.tensors("actor/optimizer")["count"].item() == step
    assert checkpoint.json("trainer.json") == {"step": step, "kl_coef": 0.1 + step, "seeds": [1, 2]}
    assert checkpoint.batch("buffer.parquet") == contents(step)["buffer.parquet"]


def name(shard: Shard) -> str:
    return shard.name


def store_with(path: Path, *steps: int, keep: int = 9) -> CheckpointStore:
    store = CheckpointStore(path, keep=keep)
    for step in steps:
        assert store.begin(step, contents(step), IDENTITY).wait()
    return store


def test_round_trip_of_everything(tmp_path: Path) -> None:
    store = store_with(tmp_path / "checkpoints", 10)
    assert_holds(store.load(identity=IDENTITY), 10)
    assert_holds(load_checkpoint(store.path(10)), 10)
    assert_holds(load_checkpoint(tmp_path / "checkpoints" / "latest"), 10)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000010"]
    assert "actor/weights" in store.load()
    assert "critic/weights" not in store.load()
    with pytest.raises(CheckpointError, match=r"no 'critic\.json'"):
        store.load().json("critic.json")


def test_empty_store_has_nothing_to_load(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.load() is None
    assert store.steps() == []


def test_tensor_files_are_plain_safetensors_of_bounded_size(tmp_path: Path) -> None:
    tensors = {
        f"t{i}": torch.arange(10 + i).to(d) for i, d in enumerate(tensor_files._DTYPES) if "float8" not in str(d)
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "flag": torch.tensor([True, False])}
    stream = [Shard.whole(*item) for item in tensors.items()]
    paths = list(tensor_files.write_shards(tmp_path / "x", stream, max_bytes=100))
    assert len(paths) > 3
    read: dict[str, torch.Tensor] = {}
    for path in paths:
        read |= load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) and read[key].dtype == tensors[key].dtype for key in tensors)


def test_pieces_of_a_weight_keep_their_places(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    shards = [Shard("w", (4, 3), (row, 0), whole[row : row + 2]) for row in (0, 2)]
    assert save_checkpoint(tmp_path / "c", 1, {"actor/weights": shards})
    read = sorted(load_checkpoint(tmp_path / "c").shards("actor/weights"), key=lambda s: s.offset)
    assert [(s.name, s.global_shape, s.offset) for s in read] == [("w", (4, 3), (0, 0)), ("w", (4, 3), (2, 0))]
    assert torch.equal(torch.cat([s.tensor for s in read]), whole)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4, keep=2)
    assert store.steps() == [3, 4]
    assert os.readlink(tmp_path / "latest") == "step-000004"
    # A newer damaged one counts, but never drives out the one just written.
    single = CheckpointStore(tmp_path, keep=1)
    assert single.begin(2, contents(2)).wait()
    assert 2 in single.steps()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = store_with(tmp_path, 5)
    assert save_checkpoint(tmp_path / "step-000005", 5, {"trainer.json": "new"})
    assert store.load().json("trainer.json") == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000005"]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("project")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for taken in ("project", "file", "link"):
        with pytest.raises(CheckpointError, match=f"{taken} is there already and is no checkpoint.* name a directory"):
            save_checkpoint(tmp_path / taken, 1, contents(1))
    assert sorted(tmp_path.rglob("*")) == before
    for step in (1, 2):
        assert save_checkpoint(tmp_path / "empty", step, contents(step))
    assert_holds(load_checkpoint(tmp_path / "empty"), 2)
    # A run's own checkpoint that has lost its manifest gives way, so that the run can go on.
    store = store_with(tmp_path / "store", 1)
    (store.path(1) / "manifest.json").unlink()
    assert store.begin(1, contents(1), IDENTITY).wait()


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_flipped_bit_and_cut_is_found_and_the_one_before_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_with(tmp_path, 1, 2)
    names = files_of(store.path(2))
    assert len(names) == 5
    rng = random.Random(0)
    for file in names:
        good = file.read_bytes()
        where = [rng.randrange(len(good)) for _ in range(12)] + [0, len(good) - 1]
        damages = [good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :] for at in where]
        damages += [good[: len(good) // 2], good[:-1], b"", good + b"\0"]
        for damaged in damages:
            file.write_bytes(damaged)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                found = store.load(identity=IDENTITY)
            assert_holds(found, 1)
            assert file.name in caplog.text
            assert "taking the one before it" in caplog.text
            with pytest.raises(DamagedCheckpointError, match="is damaged"):
                load_checkpoint(store.path(2))
            assert not verify(store.path(2)).ok
        file.unlink()
        assert_holds(store.load(), 1)
        file.write_bytes(good)
    assert_holds(store.load(), 2)


def test_when_none_is_whole_each_reason_is_given(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    for step in (1, 2):
        (store.path(step) / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*000002.*000001.* start anew"):
        store.load()


def test_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    other = {**IDENTITY, "actor.architecture": "GPT2LMHeadModel", "critic.shapes": "77"}
    with pytest.raises(CheckpointError) as caught:
        store.load(identity=other)
    message = str(caught.value)
    assert "actor.architecture is 'LlamaForCausalLM' there and 'GPT2LMHeadModel' here" in message
    assert "critic.shapes is not given there and '77' here" in message
    assert "config" not in message.split(":", 1)[1].split("Use the model")[0]


def test_model_identity_tells_models_apart() -> None:
    def shapes(step: int) -> dict[str, torch.Tensor]:
        return {shard.name: shard.tensor for shard in weights(step)}

    one = model_identity("actor", "Llama", shapes(1))
    assert one == model_identity("actor", "Llama", dict(reversed(shapes(2).items())))
    assert one["actor.parameters"] == "45"
    wider = {**shapes(1), "extra": torch.zeros(2)}
    assert model_identity("actor", "Llama", wider)["actor.shapes"] != one["actor.shapes"]


def forge(root: Path, content: dict[str, bytes], names: dict[str, bytes] | None = None, **manifest: object) -> None:
    """A checkpoint that somebody else has made: all digests are right."""
    import hashlib

    entries = {key: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for key, data in content.items()}
    for key, data in (names if names is not None else {**content, "manifest.json": b""}).items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    root.mkdir(exist_ok=True)
    manifest = {"files": entries, "format": CHECKPOINT.current, "identity": {}, "step": 1, **manifest}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (root / "manifest.json").write_text(json.dumps({**manifest, "digest": digest}, indent=1, sort_keys=True) + "\n")


def test_another_format_is_refused_as_such_and_not_called_damaged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    old = {"steps": 2, "skipped": 0, "loader": {"row": 3}, "extra": {}}  # trainer.json as format 1 had it
    forge(store.path(2), {"trainer.json": json.dumps(old).encode()}, format=1, step=2)
    for read in (lambda: store.load(), lambda: load_checkpoint(store.path(2))):
        with pytest.raises(CheckpointError, match="has format 1, and this version of verl reads format 4") as refused:
            read()
        assert not isinstance(refused.value, DamagedCheckpointError)
        assert "start anew (--fresh)" in str(refused.value)
    assert "has format 1" in str(verify(store.path(2)))
    assert store.steps() == [1, 2]


def test_paths_may_not_leave_the_directory(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_bytes(b"{}")
    for number, escape in enumerate(
        ["../secret.json", str(secret), "a/../../secret.json", "..\\secret.json", "./x.json"]
    ):
        forge(tmp_path / f"c{number}", {escape: b"{}"}, names={})
        with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
            load_checkpoint(tmp_path / f"c{number}")
    forge(tmp_path / "link", {"trainer.json": b"{}"}, names={})
    (tmp_path / "link" / "trainer.json").symlink_to(secret)
    with pytest.raises(DamagedCheckpointError, match="symbolic link"):
        load_checkpoint(tmp_path / "link")
    forge(tmp_path / "folder", {"actor/trainer.json": b"{}"}, names={})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "trainer.json").write_bytes(b"{}")
    (tmp_path / "folder" / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpointError, match="symbolic link"):
        load_checkpoint(tmp_path / "folder")


def test_pickles_pipes_and_nonsense_are_refused_not_run(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    bomb = pickle.dumps(Bomb())
    names = ["actor/weights-00001.safetensors", "trainer.json", "buffer.parquet"]
    forge_root = tmp_path / "forged"
    forge(forge_root, dict.fromkeys(names, bomb))
    checkpoint = load_checkpoint(forge_root)
    with pytest.raises(CheckpointError):
        list(checkpoint.shards("actor/weights"))
    with pytest.raises(CheckpointError):
        checkpoint.json("trainer.json")
    with pytest.raises(CheckpointError):
        checkpoint.batch("buffer.parquet")
    assert not verify(forge_root).ok
    assert not (tmp_path / "exploded").exists()
    forge(tmp_path / "pipe", {"trainer.json": b""}, names={})
    os.mkfifo(tmp_path / "pipe" / "trainer.json")
    with pytest.raises(DamagedCheckpointError, match="no regular file"):
        load_checkpoint(tmp_path / "pipe")


def test_names_that_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    for wrong in ("../x.json", "/x.json", "a/../x.json", "manifest.json", "x.pkl", ""):
        with pytest.raises(CheckpointError):
            save_checkpoint(tmp_path / "c", 1, {wrong: {}})
    with pytest.raises(CheckpointError, match="two tensors"):
        save_checkpoint(tmp_path / "c", 1, {"w": [Shard.whole("a", torch.zeros(1))] * 2})
    assert list(tmp_path.iterdir()) == []


# A disk that does not take it: the result says so, nothing is harmed, nothing is left behind.


def assert_unharmed(store: CheckpointStore, result: object, words: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not result
    assert words in result.error
    assert "training goes on" in caplog.text
    assert sorted(p.name for p in store.directory.iterdir()) == ["latest", "step-000001"]
    assert_holds(store.load(), 1)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_file_size_limit_during_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        result = store.begin(2, {**contents(2), "critic/weights": {"w": torch.zeros(100_000)}}, IDENTITY).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_unharmed(store, result, "larger than this process may write", caplog)
    assert store.begin(3, contents(3), IDENTITY).wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=False).returncode
    ):
        pytest.skip("only root may mount a small disk")
    yield path
    # A loaded checkpoint maps its files, and the traceback of a failed test holds it: the mount goes all the same.
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_full_disk_during_a_save(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(small_disk, 1)
    for big in ({"critic/weights": {"w": torch.zeros(400_000)}}, {"huge.json": "x" * 2_000_000}):
        assert_unharmed(store, store.begin(2, {**contents(2), **big}, IDENTITY).wait(), "the disk is full", caplog)
    table = Batch.from_columns({"id": np.random.default_rng(0).bytes(1_500_000).hex().split("0")})
    result = store.begin(2, {"buffer.parquet": table}).wait()
    assert not result
    assert_holds(store.load(), 1)
    assert store.begin(2, contents(2), IDENTITY).wait()


def test_read_only_disk_during_a_save(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_unharmed(store, store.begin(2, contents(2), IDENTITY).wait(), "read-only", caplog)
    assert_holds(CheckpointStore(small_disk).load(), 1)


def test_directory_without_permission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Root may write anywhere; a file in the directory's place stops everybody.
    (tmp_path / "file").write_text("")
    result = CheckpointStore(tmp_path / "file" / "checkpoints").begin(1, contents(1)).wait()
    assert not result
    assert "training goes on" in caplog.text


def test_verify_reports_values_that_are_not_finite(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "good", 4, contents(4))
    report = verify(tmp_path / "good")
    assert report.ok
    assert (report.step, report.files, report.tensors) == (4, 4, 5)
    assert "whole (step 4, 4 files" in str(report)
    forge(tmp_path / "bad", {"actor/weights-00001.safetensors": safetensors({"w": torch.tensor([1.0, float("nan")])})})
    assert "tensor 'w' of actor/weights" in str(verify(tmp_path / "bad"))
    assert "no checkpoint at" in str(verify(tmp_path / "absent"))
    (tmp_path / "other").mkdir()
    assert "is no checkpoint, or a damaged one: it has no manifest.json" in str(verify(tmp_path / "other"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_a_tensor_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    store = store_with(tmp_path, 1)
    bad = torch.zeros(64, 3)
    bad[50, 1] = value
    with pytest.raises(CheckpointError, match=r"step-000002 was not saved: actor/weights: 'layer\.w' has values"):
        store.begin(2, {"trainer.json": {}, "actor/weights": {"a": torch.ones(2), "layer.w": bad.to(dtype)}}).wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert_holds(store.load(), 1)


def test_json_that_cannot_be_read_back_is_refused_by_name(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    for wrong in (deep, {"a": object()}, {"a": "\ud800"}):
        with pytest.raises(CheckpointError, match=r"was not saved: state\.json: JSON cannot hold"):
            save_checkpoint(tmp_path / "c", 1, {"state.json": wrong})
    assert list(tmp_path.iterdir()) == []


def test_malformed_manifests_and_links_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(tmp_path, 1, 2)
    good = (store.path(2) / "manifest.json").read_bytes()
    deep = b"[" * 200_000
    entry = {"sha256": "0" * 64, "size": 2}
    wrong: list[bytes] = [b"[]", deep, b'{"files": ' + deep, b"NaN", b"9" * 5000, b'"\xff"', b"", b"null"]
    for key in ("digest", "files", "format", "identity", "step"):
        for value in (None, True, [], {"a": {}}, "x", 1.5, -1, 2**70):
            wrong.append(json.dumps({**json.loads(good), key: value}).encode())
    for raw in wrong:
        (store.path(2) / "manifest.json").write_bytes(raw)
        assert_holds(store.load(), 1)
    for step in (True, -1, 2.0, "2", 3, None):
        shutil.rmtree(store.path(2))
        forge(store.path(2), {"trainer.json": b"{}"}, step=step)
        assert_holds(store.load(), 1)
    for files in ([], {"a.json": 1}, {"a.json": {**entry, "size": True}}, {"a.json": {**entry, "size": -2}}):
        shutil.rmtree(store.path(2))
        forge(store.path(2), {}, step=2, files=files)
        assert_holds(store.load(), 1)
    shutil.rmtree(store.path(2))
    save_checkpoint(tmp_path / "elsewhere", 2, contents(2), IDENTITY)
    store.path(2).symlink_to("elsewhere")
    caplog.clear()
    assert_holds(store.load(), 1)
    assert "step-000002 is damaged: it is a symbolic link; taking the one before it" in caplog.text


def test_malformed_pieces_of_weights_are_damage(tmp_path: Path) -> None:
    name = "actor/weights-00001.safetensors"
    piece = {"w": ["w", [4, 2], [2, 0]]}
    wrong = ["[" * 200_000, "[]", '{"w": 3}', '{"w": ["w", [4, 2], [true, 0]]}', '{"w": ["w", [4], [2]]}']
    wrong += [json.dumps({"w": ["w", [4, 2], at]}) for at in ([3, 0], [-1, 0], [2**70, 0], [2])]
    for number, metadata in enumerate([json.dumps(piece), *wrong]):
        data = safetensors({"w": torch.ones(2, 2)}, metadata={"shards": metadata})
        forge(tmp_path / str(number), {name: data})
        checkpoint = load_checkpoint(tmp_path / str(number))
        if number:
            with pytest.raises(DamagedCheckpointError, match="cannot be read as tensors"):
                list(checkpoint.shards("actor/weights"))
        else:
            assert [s.offset for s in checkpoint.shards("actor/weights")] == [(2, 0)]


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    tensors, meta = rng_state()
    assert save_checkpoint(tmp_path / "c", 1, {"rng": tensors, "rng.json": meta.model_dump()})
    draws = [
        (random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
        for _ in "ab"
    ]
    checkpoint = load_checkpoint(tmp_path / "c")
    set_rng_state(checkpoint.tensors("rng"), checkpoint.json("rng.json", RandomState))
    again = [
        (random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
        for _ in "ab"
    ]
    assert again == draws
    with pytest.raises(CheckpointError, match="cannot be restored"):
        set_rng_state({}, meta)
