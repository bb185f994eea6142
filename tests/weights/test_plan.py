"""What a plan says, for any layouts: every element arrives once, nothing else moves, and bytes are the paper's."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.moved import micro_groups, moved_bytes, paper_table
from tests.properties import examples
from verl.errors import ConfigError
from verl.weights.layout import Layout, Mesh, generation_mesh
from verl.weights.plan import ReshardPlan, SliceTransfer, transition
from verl.weights.shard import ShardedDim, ShardSlice, Slice, WeightSpec

SIZES = st.sampled_from([1, 2, 4])


def weights(layout: Layout, hidden: int = 16, layers: int = 4) -> dict[str, WeightSpec]:
    """Of a model with fused matrices, tied embeddings and norms; cut as engines cut them."""

    def spec(name: str, shape: tuple[int, ...], tp: ShardedDim | None, stages: tuple[int, ...]) -> WeightSpec:
        cuts = [tp] if tp is not None and layout.tp > 1 else []
        if layout.shard > 1:
            cuts.append(ShardedDim("shard", 0))
        return WeightSpec(name, shape, torch.float32, tuple(cuts), stages if layout.pp > 1 else ())

    found = [spec("embedding", (8 * hidden, hidden), ShardedDim("tp", 0), (0, layout.pp - 1))]
    for layer in range(layers):
        stage = (layer * layout.pp // layers,)
        found += [
            spec(f"{layer}.qkv", (3 * hidden, hidden), ShardedDim("tp", 0, 3), stage),
            spec(f"{layer}.bias", (3 * hidden,), ShardedDim("tp", 0, 3), stage),
            spec(f"{layer}.out", (hidden, 2 * hidden), ShardedDim("tp", 1), stage),
            spec(f"{layer}.norm", (hidden,), None, stage),
        ]
    found.append(WeightSpec("scale", (), torch.float32))
    return {one.name: one for one in found}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, Mesh]:
    layout = Layout(
        pp=draw(SIZES), replicate=draw(SIZES), shard=draw(SIZES), sp=draw(st.sampled_from([1, 2])), tp=draw(SIZES)
    )
    assume(layout.size <= 16)
    ranks = list(range(3, 3 + layout.size))
    random.Random(draw(st.integers(0, 99))).shuffle(ranks)
    train = Mesh(tuple(ranks), layout)
    pg = draw(st.sampled_from([n for n in (1, 2, 4) if layout.pp % n == 0]))
    tg = draw(st.sampled_from([n for n in (1, 2, 4) if layout.tp % n == 0]))
    return train, generation_mesh(train, pg, tg)


def fill(plan: ReshardPlan, rank: int, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's parts in the target as the plan's transfers make them; -1 where none came."""
    parts = {}
    for name in plan.names(rank):
        part = torch.full(plan.local_shape(rank, name), -1.0)
        for transfer in (r for bucket in plan.incoming(rank) for r in bucket if r.name == name):
            assert any(contains(block, transfer) for block in plan.held(transfer.source, name)), transfer
            place = next(_place(block, transfer) for block in plan.blocks(rank, name) if contains(block, transfer))
            assert (part[place] == -1).all(), transfer
            part[place] = whole[name][slices(transfer.slice)]
        parts[name] = part
    return parts


def exchanging(plan: ReshardPlan) -> set[frozenset[int]]:
    """Pairs of ranks of which one gives the other something."""
    transfers = (each for rank in plan.target.ranks for bucket in plan.incoming(rank) for each in bucket)
    return {frozenset((each.source, each.target)) for each in transfers if each.source != each.target}


def slices(whole: Slice) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*whole, strict=True))


def contains(block: ShardSlice, transfer: SliceTransfer) -> bool:
    pairs = zip(*transfer.slice, *block.slice, strict=True)
    return all(a >= b and a + n <= b + m for a, n, b, m in pairs)


def _place(block: ShardSlice, transfer: SliceTransfer) -> tuple[slice, ...]:
    starts = zip(block.local.offset, transfer.slice.offset, block.slice.offset, strict=True)
    return slices(Slice(tuple(p + a - b for p, a, b in starts), transfer.slice.shape))


@examples(12)
@given(layouts(), st.sampled_from([64, 1 << 10, 1 << 20]))
def test_every_element_arrives_once_and_nothing_that_is_there_moves(meshes: tuple[Mesh, Mesh], limit: int) -> None:
    train, generation = meshes
    specs = weights(train.layout)
    plan = transition(train, generation, specs, bucket_bytes=limit)
    whole = {name: torch.arange(spec.nbytes // 4).view(spec.shape).float() for name, spec in specs.items()}
    for rank in random.Random(0).sample(train.ranks, min(8, train.size)):
        for name, part in fill(plan, rank, whole).items():
            blocks = plan.blocks(rank, name)
            expected = torch.full_like(part, -2.0)
            for block in blocks:
                expected[slices(block.local)] = whole[name][slices(block.slice)]
            assert torch.equal(part, expected), name
            # What this rank holds of it is not asked of another.
            for transfer in (r for bucket in plan.incoming(rank) for r in bucket if r.name == name):
                held = [block for block in plan.held(rank, name) if contains(block, transfer)]
                assert (transfer.source == rank) == bool(held), transfer
        # The training piece lies within the generation part.
        moved = moved_bytes(plan, rank)
        assert moved.own == moved.source
        sent = [r for bucket in plan.outgoing(rank) for r in bucket]
        assert all(
            r.source == rank and r in plan.incoming(r.target)[n] for n, b in enumerate(plan.outgoing(rank)) for r in b
        )
        assert len(sent) == len(set(sent))


@examples(12)
@given(st.data())
def test_any_ranks_become_tensor_parallel_ones(data: st.DataObject) -> None:
    """Stages, sequence-parallel ranks, odd shards, and weights that are cut as they lie in memory."""
    sizes = st.sampled_from([1, 2, 3])
    train = Layout(pp=data.draw(sizes), shard=data.draw(sizes), sp=data.draw(sizes))
    tg = data.draw(st.sampled_from([n for n in range(1, train.size + 1) if train.size % n == 0]))
    mesh = Mesh(tuple(range(train.size)), train)
    generation = generation_mesh(mesh, 1, tg)
    assert generation.layout.tp == tg and sorted(generation.ranks) == [*mesh.ranks]
    specs = weights(train, hidden=5)
    if train.shard > 1 and data.draw(st.booleans()):
        specs = {
            name: replace(spec, sharded_dims=(ShardedDim("shard", None),)) for name, spec in specs.items() if spec.shape
        }
    target = {name: spec.sharded_dims for name, spec in weights(Layout(tp=tg, replicate=2), hidden=5).items()}
    plan = transition(mesh, generation, specs, target, bucket_bytes=data.draw(st.sampled_from([64, 1 << 20])))
    whole = {name: torch.arange(spec.nbytes // 4).view(spec.shape).float() for name, spec in specs.items()}
    for rank in mesh.ranks:
        for name, part in fill(plan, rank, whole).items():
            for block in plan.blocks(rank, name):
                expected = whole[name][slices(block.slice)]
                assert torch.equal(part[slices(block.local)], expected), name


@examples(25)
@given(layouts())
def test_bytes_are_those_of_the_paper(meshes: tuple[Mesh, Mesh]) -> None:
    train, generation = meshes
    layout = train.layout
    # Stages of equal size: nothing outside of the layers, and no tied weight on two of them.
    specs = {name: s for name, s in weights(layout).items() if name[0].isdigit() and not name.endswith("norm")}
    plan = transition(train, generation, specs)
    total = sum(spec.nbytes for spec in specs.values())
    ours = paper_table(layout, generation.layout)["ours"]
    for rank in train.ranks[:4]:
        moved = moved_bytes(plan, rank)
        assert moved.received == pytest.approx(ours.received * total)
        assert moved.target == pytest.approx(ours.peak * total)
        assert moved.source - moved.own == ours.redundant


@examples(25)
@given(layouts())
def test_ranks_exchange_inside_of_micro_groups_alone(meshes: tuple[Mesh, Mesh]) -> None:
    train, generation = meshes
    plan = transition(train, generation, weights(train.layout))
    groups = [set(group) for group in micro_groups(train, generation)]
    assert sorted(rank for group in groups for rank in group) == sorted(train.ranks)
    assert all(any(pair <= micro for micro in groups) for pair in exchanging(plan))


def test_the_example_of_the_paper() -> None:
    """Figure 8: training 1-4-2, generation 1-2-2-2, GPUs G1 to G8."""
    train = Mesh(tuple(range(1, 9)), Layout(replicate=2, tp=4))
    generation = generation_mesh(train, 1, 2)
    assert generation.layout == Layout(replicate=4, tp=2)
    assert [generation.group(rank, "tp") for rank in (1, 2, 5, 6)] == [(1, 3), (2, 4), (5, 7), (6, 8)]
    assert micro_groups(train, generation) == [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_fsdp_becomes_whole_and_tensor_parallel() -> None:
    train = Mesh((0, 1, 2, 3), Layout(shard=4))
    specs = {"up": WeightSpec("up", (8, 4), torch.float32, (ShardedDim("shard", 0),))}
    whole = transition(train, generation_mesh(train), specs)
    assert [moved_bytes(whole, rank)[:2] for rank in train.ranks] == [(96, 32)] * 4
    cut = transition(train, generation_mesh(train, 1, 2), specs, {"up": (ShardedDim("tp", 0),)})
    assert [moved_bytes(cut, rank)[:2] for rank in train.ranks] == [(32, 32)] * 4
    assert exchanging(cut) == {frozenset((0, 1)), frozenset((2, 3))}
    assert generation_mesh(train, 1, 2).ranks == (0, 2, 1, 3)
    with pytest.raises(ConfigError, match="not cut along tp in the source"):
        transition(train, generation_mesh(train, 1, 2), specs)


def test_other_ranks_are_given_all_that_they_need() -> None:
    train, apart = Mesh((0, 1), Layout(tp=2)), Mesh((2, 3), Layout(replicate=2))
    specs = weights(train.layout)
    plan = transition(train, apart, specs)
    total = sum(spec.nbytes for spec in specs.values())
    assert [moved_bytes(plan, rank).received for rank in apart.ranks] == [total, total]
    assert plan.incoming(0) == ((),) * len(plan.buckets)
    sources = {r.source for bucket in plan.incoming(2) for r in bucket}
    assert sources == {0, 1}


@pytest.mark.parametrize(("pg", "tg", "words"), [(3, 1, "pp=3 does not divide the 2"), (1, 3, "tp=3 does not divide")])
def test_sizes_that_do_not_divide_are_refused(pg: int, tg: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generation_mesh(Mesh(tuple(range(4)), Layout(pp=2, tp=2)), pg, tg)


def llama_weights(layout: Layout, *, runs: bool = False, layers: int = 4) -> dict[str, WeightSpec]:
    """Of Llama 7B with fewer layers, cut as engines cut them; `runs`: as ZeRO 3 does."""
    h, inner, vocab = 4096, 11008, 32000
    shapes = {"embed": ((vocab, h), 0), "head": ((vocab, h), 0), "norm": ((h,), None)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": ((h, h), 0) for name in "qkv"}
        shapes |= {f"{layer}.o": ((h, h), 1), f"{layer}.gate": ((inner, h), 0), f"{layer}.up": ((inner, h), 0)}
        shapes |= {f"{layer}.down": ((h, inner), 1), f"{layer}.norm": ((h,), None)}
    found = {}
    for name, (shape, axis) in shapes.items():
        cuts = [ShardedDim("tp", axis)] if axis is not None and layout.tp > 1 else []
        if layout.shard > 1:
            cuts.append(ShardedDim("shard", None if runs else 0))
        stage = (
            int(name.split(".")[0]) * layout.pp // layers if "." in name else (0 if name == "embed" else layout.pp - 1)
        )
        found[name] = WeightSpec(name, shape, torch.bfloat16, tuple(cuts), (stage,) if layout.pp > 1 else ())
    return found


def counted(train: Layout, tg: int, *, runs: bool = False) -> tuple[float, float, float]:
    """Most that a rank receives, generates with, and holds twice, as shares of all weights."""
    mesh = Mesh(tuple(range(train.size)), train)
    generation = generation_mesh(mesh, 1, tg)
    specs = llama_weights(train, runs=runs)
    cuts = {name: tuple(c for c in spec.sharded_dims) for name, spec in llama_weights(Layout(tp=tg)).items()}
    plan = transition(mesh, generation, specs, cuts)
    total, found = sum(spec.nbytes for spec in specs.values()), []
    for rank in mesh.ranks:
        own = dict.fromkeys(specs, 0)
        for transfer in (transfer for bucket in plan.incoming(rank) for transfer in bucket):
            own[transfer.name] += transfer.slice.numel * 2 if transfer.source == rank else 0
        held = {name: sum(block.slice.numel * 2 for block in plan.held(rank, name)) for name in specs}
        # A training piece is freed where all of it is part of what generates (`HybridWeights`), of ZeRO none.
        twice = sum(own[name] for name in specs if runs or own[name] < held[name])
        moved = moved_bytes(plan, rank)
        found.append((moved.received, moved.target, twice))
    return tuple(max(column) / total for column in zip(*found, strict=True))  # type: ignore[return-value]


PAGE = Path(__file__).parents[2] / "docs" / "hybrid_engine.md"
PAIRS = {
    "tensor 4, generation tensor 2": (Layout(tp=4), 2, False),
    "tensor 4, generation whole": (Layout(tp=4), 1, False),
    "pipeline 2 x tensor 2, generation tensor 2": (Layout(pp=2, tp=2), 2, False),
    "pipeline 4, generation tensor 2": (Layout(pp=4), 2, False),
    "FSDP 4, generation whole": (Layout(shard=4), 1, False),
    "FSDP 4, generation tensor 2": (Layout(shard=4), 2, False),
    "FSDP 4, generation tensor 4": (Layout(shard=4), 4, False),
    "ZeRO 3 on 4, generation tensor 2": (Layout(shard=4), 2, True),
}


def test_the_table_of_layouts_in_the_docs_is_what_is_counted() -> None:
    rows = dict(re.findall(r"^\| ([\w ,]+?) \| (0\.\d\d \| [01]\.\d\d \| 0\.\d\d) \|$", PAGE.read_text("utf-8"), re.M))
    assert rows == {
        name: " | ".join(f"{share:.2f}" for share in counted(t, g, runs=r)) for name, (t, g, r) in PAIRS.items()
    }
