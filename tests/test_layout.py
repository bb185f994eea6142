"""Layouts and meshes: rows, answers and groups, over random sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.cluster.rank_context import RoleMeshes
from verl.errors import ConfigError
from verl.weights.layout import DATA_DIMS, DIMS, Layout, Mesh, ModelShape, generation_mesh

LAYOUTS = st.builds(Layout, **{dim: st.integers(1, 3) for dim in DIMS}).filter(lambda layout: layout.size <= 64)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    layout = draw(LAYOUTS)
    return Mesh(tuple(draw(st.permutations(range(layout.size)))), layout)


@given(meshes())
def test_each_part_of_the_rows_is_answered_by_one_rank(mesh: Mesh) -> None:
    answering = [mesh.rows(rank) for rank in mesh.ranks if mesh.answers(rank)]
    parts = mesh.layout.data_size
    assert sorted(answering) == [(index, parts) for index in range(parts)]
    assert [mesh.rows(rank) for rank in mesh.answering()] == [(index, parts) for index in range(parts)]


@given(meshes())
def test_ranks_of_a_model_group_get_the_same_rows(mesh: Mesh) -> None:
    for rank in mesh.ranks:
        assert {mesh.rows(other) for other in mesh.group(rank, "pp", "sp", "tp")} == {mesh.rows(rank)}


@given(meshes(), st.sets(st.sampled_from(DIMS)))
def test_groups_cut_the_mesh_into_equal_parts(mesh: Mesh, dims: set[str]) -> None:
    groups = {mesh.group(rank, *dims) for rank in mesh.ranks}
    size = math.prod(getattr(mesh.layout, dim) for dim in dims)
    assert all(len(group) == size for group in groups)
    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)


@given(meshes(), st.sets(st.sampled_from(DIMS)))
def test_parts_are_all_groups_along_some_dimensions(mesh: Mesh, dims: set[str]) -> None:
    groups = {tuple(sorted(mesh.group(rank, *dims))) for rank in mesh.ranks}
    assert all((1 < len(group) < mesh.size) == (group in mesh.parts()) for group in groups)
    assert len(set(mesh.parts())) == len(mesh.parts())


@given(meshes())
def test_process_groups_are_of_ranks_that_ascend(mesh: Mesh) -> None:
    groups = [mesh.group(rank, dim) for rank in mesh.ranks for dim in DIMS if dim != "replicate"]
    if all(list(group) == sorted(group) for group in groups):
        mesh.check_order()
    else:
        with pytest.raises(ConfigError, match=r"rank \d+ comes before rank \d+ along"):
            mesh.check_order()


@pytest.mark.parametrize("train", [Layout(pp=2, replicate=2, tp=4), Layout(shard=8), Layout(pp=2, shard=2, tp=2)])
def test_generation_has_process_groups_that_ascend(train: Layout) -> None:
    mesh = Mesh(tuple(range(train.size)), train)
    mesh.check_order()
    for pg in (1, train.pp):
        for tg in (1, 2):
            generation_mesh(mesh, pg, tg).check_order()


def test_a_role_has_no_ranks_in_another_order() -> None:
    with pytest.raises(ConfigError, match="rank 1 comes before rank 0 along tp"):
        RoleMeshes("actor", {"train": Mesh((1, 0), Layout(tp=2))})


def test_tensor_ranks_are_neighbours_and_stages_are_furthest_apart() -> None:
    mesh = Mesh(tuple(range(8)), Layout(pp=2, shard=2, tp=2))
    assert mesh.group(0, "tp") == (0, 1)
    assert mesh.group(0, "shard") == (0, 2)
    assert mesh.group(0, "pp") == (0, 4)
    assert mesh.answering() == (4, 6)
    assert mesh.rows(7) == (1, 2)
    assert mesh.rows(8) is None and not mesh.answers(8)


def test_data_parallel_meshes() -> None:
    assert Mesh((3, 1), Layout(replicate=2)).rows(1) == (1, 2)
    assert set(DATA_DIMS) < set(DIMS)


@pytest.mark.parametrize(
    ("layout", "shape", "words"),
    [
        (Layout(pp=5), ModelShape(layers=4), "pp=5 leaves a stage without layers: the model has 4"),
        (Layout(tp=3), ModelShape(heads=4), "tp=3 does not divide the model's 4 attention heads"),
        (Layout(tp=4), ModelShape(heads=4, kv_heads=2), "tp=4 does not divide the model's 2 key-value heads"),
        (Layout(tp=2), ModelShape(kind="falcon"), "tp does not cut models of type 'falcon': transformers has no"),
        (Layout(tp=2), ModelShape(kind="x", plan={"layers.*": "new"}), "tp does not cut .* 'x': .* unknown here, new"),
        (Layout(tp=2, sp=4), ModelShape(heads=4), "tp x sp=8 does not divide"),
        (Layout(ep=3), ModelShape(experts=4), "ep=3 does not divide the model's 4 experts"),
        (Layout(ep=2, tp=2), ModelShape(experts=4), "experts are cut by ep or by tp, not by both"),
        (Layout(ep=2), ModelShape(), "ep=2 does not divide the model's 0 experts"),
    ],
)
def test_what_a_model_cannot_have_is_refused_by_name(layout: Layout, shape: ModelShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout.check(shape)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="tp is a number of ranks, at least 1, not 0"):
        Layout(tp=0)
    with pytest.raises(ConfigError, match="needs 2 different ranks, got"):
        Mesh((0,), Layout(tp=2))
    with pytest.raises(ConfigError, match="needs 2 different ranks, got"):
        Mesh((1, 1), Layout(tp=2))
    with pytest.raises(ConfigError, match="no dimension 'tensor'"):
        Mesh((0,)).group(0, "tensor")
