"""The generation layout on the ranks of a training layout (HybridFlow, arXiv 2409.19256, section 5.3)."""

from __future__ import annotations

from typing import NamedTuple

from verl.errors import ConfigError
from verl.layout import Layout, Mesh


def generation_mesh(train: Mesh, pg: int = 1, tg: int = 1) -> Mesh:
    """The mesh on which the ranks of a training mesh generate: p t / (pg tg) replicas in the place of each one.

    Tensor groups are ranks at stride t / tg, pipeline groups at stride p / pg (in stages), so that what a rank trains
    is a part of what it generates with. The ranks between (a micro data-parallel group) hold together what each
    of them generates with. Without tensor parallelism in training, ranks along `shard` (FSDP) become
    tensor-parallel ones. Where `tg` divides neither, the tensor-parallel ranks of generation are neighbours.

    Args:
        train: of any layout.
        pg, tg: pipeline stages and tensor-parallel ranks in generation.

    Raises:
        ConfigError: the sizes do not divide those of training.
    """
    layout = train.layout
    if tg > 0 and pg == 1 and not train.size % tg and layout.tp % tg and (layout.tp > 1 or layout.shard % tg):
        return Mesh(tuple(sorted(train.ranks)), Layout(replicate=train.size // tg, tp=tg))
    split = _shards_a_part(layout, tg)
    if pg < 1 or layout.pp % pg:
        raise ConfigError(f"generation: pp={pg} does not divide the {layout.pp} pipeline stages of training")
    places: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]] = {}
    for rank in train.ranks:
        at = train.coordinate(rank)
        stage, in_stage = divmod(at["pp"], layout.pp // pg)
        if split:
            part, between = divmod(at["shard"], layout.shard // split)
            key = {**at, "pp": in_stage, "shard": between}
        else:
            part, between = divmod(at["tp"], layout.tp // tg)
            key = {**at, "pp": in_stage, "tp": between}
        places.setdefault((stage, part), []).append((tuple(key[dim] for dim in _REPLICAS), rank))
    columns = [[rank for _, rank in sorted(places[stage, part])] for stage in range(pg) for part in range(tg)]
    replicas = train.size // (pg * tg)
    ranks = tuple(
        columns[stage * tg + part][replica] for stage in range(pg) for replica in range(replicas) for part in range(tg)
    )
    return Mesh(ranks, Layout(pp=pg, replicate=replicas, tp=tg))


class PaperColumn(NamedTuple):
    """What each rank receives, holds at most, and holds twice, as shares of the bytes of the weights."""

    received: float
    peak: float
    redundant: float


def paper_table(train: Layout, generation: Layout) -> dict[str, PaperColumn]:
    """Table 2 of the paper for weights that tensor and pipeline parallelism cut evenly. With FSDP the pieces are
    smaller by `shard`, and so much more is received.

    Returns:
        `all ranks`: gathering over all of them (DeepSpeed-Chat); `model-parallel group`: over tensor and pipeline
        ranks (HybridFlow-V; with FSDP over the shards too); `ours`.
    """
    pieces = train.pp * train.tp * train.shard
    ranks = pieces * train.replicate
    parts = generation.pp * generation.tp
    return {
        "all ranks": PaperColumn((ranks - 1) / ranks, 1.0, 1 / ranks),
        "model-parallel group": PaperColumn((pieces - 1) / pieces, 1.0, 1 / pieces),
        "ours": PaperColumn(1 / parts - 1 / pieces, 1 / parts, 0.0),
    }


#: What tells replicas of generation apart, those of one replica of training next to each other.
_REPLICAS = ("replicate", "shard", "sp", "ep", "pp", "tp")


def _shards_a_part(layout: Layout, tg: int) -> int:
    """Into how many tensor-parallel parts ranks along `shard` go; 0: those along `tp` do."""
    if tg >= 1 and layout.tp % tg == 0:
        return 0
    if tg >= 1 and layout.tp == 1 and layout.shard % tg == 0:
        return tg
    raise ConfigError(
        f"generation: tp={tg} does not divide the {layout.tp} tensor-parallel ranks of training"
        + (f", nor its {layout.shard} shards" if layout.tp == 1 and layout.shard > 1 else "")
    )
