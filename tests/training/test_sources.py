"""Models that ranks read for themselves: each its own part, without a whole copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ranks import job
from tests.training.cases import tiny_model
from verl.errors import ModelError
from verl.models.options import LoraOptions
from verl.models.packed import PackedModel
from verl.models.save import save_pretrained_dir
from verl.models.source import ModelFiles
from verl.weights.shard import checksum
from verl.weights.shards import model_shards, on_meta, sample

QUICK = [
    ("llama", "causal", "fsdp2"),
    ("mixtral", "causal", "ep2"),
    ("gpt2", "causal", "pp2", "lora"),
]
OTHERS = [
    ("llama", "value", "tp2"),
    ("gpt2", "causal", "tp2"),
    ("gpt2", "score", "fsdp2"),
    ("gpt2", "causal", "pp2"),
    ("llama", "value", "pp2"),
    ("mixtral", "causal", "fsdp2"),
    ("llama", "causal", "sp2"),
    ("llama", "causal", "fsdp2", "lora"),
    ("llama", "value", "tp2", "lora"),
    ("gpt2", "score", "fsdp2", "lora"),
]


@pytest.mark.quick("some")
@pytest.mark.parametrize("cases", [QUICK, OTHERS], ids=["some", "others"])
def test_ranks_read_their_own_parts_and_hold_no_more(tmp_path: Path, cases: list[tuple[str, ...]]) -> None:
    for kind in ("llama", "gpt2", "mixtral"):
        tiny_model(kind, layers=8).save_pretrained(tmp_path / kind)
    done = job(2, Path(__file__).with_name("rank_sources.py"), tmp_path, json.dumps(cases))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [tuple(line["case"]) for line in lines] == cases
    for line in lines:
        assert line["weights"] and line["predicted"] < line["tolerance"], line
        assert line["adapters"] == line["case"][3:].count("lora")
        assert line["own"] <= (1 if "sp2" in line["case"] else 0.62) * line["all"], line
        assert line["peak"] <= line["own"] + line["largest"], line


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon"])
def test_a_model_without_weights_is_taken_as_the_model_itself_is(kind: str) -> None:
    live = tiny_model(kind, torch.float32, layers=3)
    empty = on_meta(lambda: type(live)._from_config(live.config, dtype=torch.float32))
    assert {w.is_meta for w in empty.parameters()} == {True} and {w.is_meta for w in live.parameters()} == {False}
    for (name, buffer), (_, expected) in zip(empty.named_buffers(), live.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    taken, expected = PackedModel(empty, device="cpu"), PackedModel(live, fused_kernels=False)
    for name in ("supports_packed", "supports_paged", "num_heads", "num_kv_heads", "head_dim", "position_table"):
        assert getattr(taken, name) == getattr(expected, name), name
    assert empty.config._attn_implementation == live.config._attn_implementation
    with pytest.raises(ModelError, match="on the meta device"):
        PackedModel(on_meta(lambda: type(live)._from_config(live.config)))


def test_a_sample_of_a_model_has_every_kind_of_layer() -> None:
    same = sample(tiny_model("llama", layers=5))
    assert same.config.num_hidden_layers == 1 == len(same.model.layers)
    config = tiny_model("llama", layers=5).config
    model = on_meta(lambda: type(tiny_model("llama"))._from_config(config))
    model.model.layers[3].self_attn.scaling = 0.5
    assert sample(model).config.num_hidden_layers == 4


def test_files_of_a_backbone_are_read_by_parts_too(tmp_path: Path) -> None:
    backbone = tiny_model("gpt2").transformer
    backbone.save_pretrained(tmp_path / "gpt2")
    files = ModelFiles(str(tmp_path / "gpt2"), dtype="float64")
    files.by_parts(files.on_meta())
    assert checksum(files.stream()) == checksum(model_shards(files.load()))


def test_a_model_may_take_more_positions_than_its_files_say(tmp_path: Path) -> None:
    """Rotary ones, which are computed; a table of learned ones has as many as it has."""
    for name in ("llama", "gpt2"):
        tiny_model(name).save_pretrained(tmp_path / name)
    files = ModelFiles(str(tmp_path / "llama"), positions=4096)
    assert files.load().config.max_position_embeddings == files.on_meta().config.max_position_embeddings == 4096
    assert checksum(files.stream()) == checksum(model_shards(ModelFiles(str(tmp_path / "llama")).load()))
    with pytest.raises(ModelError, match="wpe"):
        ModelFiles(str(tmp_path / "gpt2"), positions=4096).load()


@pytest.mark.parametrize(("kind", "written"), [("default", 128), ("yarn", 96)])
@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)], ids=["whole", "adapters"])
def test_an_export_has_the_positions_of_the_files(
    tmp_path: Path, lora: LoraOptions | None, kind: str, written: int
) -> None:
    """Also by way of a checkpoint's configuration; unless the positions of training are in its outputs."""
    model = tiny_model("llama", torch.float32)
    if kind == "yarn":
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
        model = type(model)(type(model.config)(**{**model.config.to_dict(), "rope_parameters": rope}))
    model.save_pretrained(tmp_path / "base")
    files = ModelFiles(str(tmp_path / "base"), positions=96, lora=lora)
    live, there = files.load(), files.on_meta()
    config = type(live.config).from_dict(there.config.to_dict())
    assert live.config.max_position_embeddings == config.max_position_embeddings == 96
    for number, saved in enumerate((live.config, config)):
        live.config = saved
        save_pretrained_dir(live, None, tmp_path / f"{number}")
        text = json.loads((tmp_path / f"{number}" / "config.json").read_text())
        assert text["max_position_embeddings"] == written and "stored_max_position_embeddings" not in text
    assert live.config.max_position_embeddings == 96
    if lora is not None:
        save_pretrained_dir(live, None, tmp_path / "adapters", adapter=True)
        assert "position" not in (tmp_path / "adapters" / "adapter_config.json").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "phimoe"])
def test_weights_from_files_are_those_of_the_model_that_is_loaded(tmp_path: Path, model: str, dtype: str) -> None:
    tiny_model(model).save_pretrained(tmp_path)
    for kind in ("causal", "value"):
        files = ModelFiles(str(tmp_path), kind, dtype)
        whole = files.load()
        files.by_parts(files.on_meta())
        assert checksum(files.stream()) == checksum(model_shards(whole))
