"""Weights out as shards and back in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from verl.errors import CheckpointError
from verl.models.heads import ValueModel
from verl.models.packed import PackedModel
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.hf import HFEngine
from verl.weights.shard import Shard, checksum
from verl.weights.shards import fill_blocks, load_model_shards, model_shards

Make = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_round_trip_in_place(make_model: Make, kind: str) -> None:
    source, target = make_model(kind), make_model(kind)
    for parameter in target.parameters():
        parameter.data.zero_()
    places = [parameter.data_ptr() for parameter in target.parameters()]
    load_model_shards(target, model_shards(source))
    assert [parameter.data_ptr() for parameter in target.parameters()] == places
    assert checksum(model_shards(target)) == checksum(model_shards(source))


def test_tied_weights_occur_once_and_their_alias_is_accepted(make_model: Make) -> None:
    model = make_model("qwen2")
    shards = list(model_shards(model))
    names = [shard.name for shard in shards]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    alias = Shard.whole("lm_head.weight", shards[names.index("model.embed_tokens.weight")].tensor)
    load_model_shards(make_model("qwen2"), [*shards, alias])


def test_pieces_and_other_dtypes(llama: PreTrainedModel) -> None:
    target = copy.deepcopy(llama).bfloat16()
    pieces = []
    for shard in model_shards(llama):
        for row, piece in enumerate(shard.tensor.split(5)):
            pieces.append(Shard(shard.name, shard.global_shape, (5 * row, *shard.offset[1:]), piece))
    load_model_shards(target, pieces)
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, llama.state_dict()[name].bfloat16())


def test_a_value_model_has_checkpoint_names(llama: PreTrainedModel) -> None:
    names = [shard.name for shard in model_shards(ValueModel.from_model(llama))]
    assert names[-2:] == ["score.weight", "score.bias"]
    assert "model.layers.0.self_attn.q_proj.weight" in names


def test_mismatches_are_named(llama: PreTrainedModel) -> None:
    shards = list(model_shards(llama))
    with pytest.raises(CheckpointError, match=r"1 weights .* model.norm.weight"):
        load_model_shards(llama, [shard for shard in shards if shard.name != "model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"did you mean 'model.norm.weight'"):
        load_model_shards(llama, [Shard.whole("model.norm.weights", torch.zeros(32))])
    with pytest.raises(CheckpointError, match=r"has shape \[16\], the model's has \[32\]"):
        load_model_shards(llama, [Shard.whole("model.norm.weight", torch.zeros(16))])
    with pytest.raises(CheckpointError, match="reaches outside"):
        load_model_shards(llama, [Shard("model.norm.weight", (32,), (20,), torch.zeros(16))])
    half = Shard("model.norm.weight", (32,), (0,), torch.zeros(16))
    with pytest.raises(CheckpointError, match="came in part"):
        load_model_shards(llama, [*(shard for shard in shards if shard.name != "model.norm.weight"), half])


@pytest.mark.parametrize("name", ["embedded", "hf"])
def test_an_update_that_does_not_fit_leaves_an_engine_its_old_weights(llama: PreTrainedModel, name: str) -> None:
    llama = copy.deepcopy(llama)
    make: Any = {"embedded": lambda: EmbeddedEngine(PackedModel(llama), eos_token_ids=(2,), seed=0, kv_memory=1 << 20),
                 "hf": lambda: HFEngine(llama, eos_token_ids=(2,), seed=0)}[name]  # fmt: skip
    engine, before = make(), checksum(model_shards(llama))
    changed = [Shard.whole(shard.name, shard.tensor + 1) for shard in model_shards(llama)]

    def dying() -> Iterator[Shard]:
        yield from changed[:3]
        raise OSError("the sender is gone")

    wrong = [*changed[:-1], Shard.whole(changed[-1].name, torch.zeros(3, 5))]
    for update, error in ((wrong, CheckpointError), (changed[:-1], CheckpointError), (dying(), OSError)):
        with pytest.raises(error):
            engine.load_shards(update, 1)
        assert checksum(model_shards(llama)) == before
        assert engine.policy_version == 0
    engine.load_shards(changed, 1)
    assert checksum(model_shards(llama)) != before
    assert engine.policy_version == 1


@st.composite
def _grid(draw: st.DrawFn, shape: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Blocks (row, column, rows, columns) that tile a matrix."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    return [(r, c, r2 - r, c2 - c) for r, r2 in pairwise(cuts[0]) for c, c2 in pairwise(cuts[1])]


@given(st.data(), st.tuples(st.integers(1, 7), st.integers(1, 5)))
def test_pieces_of_any_cut_fill_blocks_of_any_other(data: st.DataObject, shape: tuple[int, int]) -> None:
    weight = torch.arange(shape[0] * shape[1]).view(shape)
    have, want = data.draw(_grid(shape)), data.draw(_grid(shape))
    for row, column, rows, columns in want:
        block = torch.full((rows, columns), -1)
        pieces = [Shard("w", shape, (r, c), weight[r : r + height, c : c + width]) for r, c, height, width in have]
        assert sum(fill_blocks([((row, column), block)], piece) for piece in pieces) == block.numel()
        assert torch.equal(block, weight[row : row + rows, column : column + columns])
