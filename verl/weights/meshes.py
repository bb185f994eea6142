"""The generation layout on the ranks of a training layout (HybridFlow, arXiv 2409.19256, section 5.3)."""

from __future__ import annotations

from verl.errors import ConfigError
from verl.weights.layout import Layout, Mesh


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
    members: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]] = {}
    for rank in train.ranks:
        coordinate = train.coordinate(rank)
        stage, in_stage = divmod(coordinate["pp"], layout.pp // pg)
        if split:
            part, between = divmod(coordinate["shard"], layout.shard // split)
            key = {**coordinate, "pp": in_stage, "shard": between}
        else:
            part, between = divmod(coordinate["tp"], layout.tp // tg)
            key = {**coordinate, "pp": in_stage, "tp": between}
        members.setdefault((stage, part), []).append((tuple(key[dim] for dim in _REPLICAS), rank))
    columns = [[rank for _, rank in sorted(members[stage, part])] for stage in range(pg) for part in range(tg)]
    replicas = train.size // (pg * tg)
    ranks = tuple(
        columns[stage * tg + part][replica] for stage in range(pg) for replica in range(replicas) for part in range(tg)
    )
    return Mesh(ranks, Layout(pp=pg, replicate=replicas, tp=tg))


def transition_shares(train: Layout, generation: Layout) -> tuple[float, float]:
    """What each rank receives before a rollout and then holds, as shares of the bytes of weights that tensor and
    pipeline parallelism cut evenly (table 2 of the paper). With FSDP the shards are smaller by `shard`, and so much
    more is received."""
    parts = generation.pp * generation.tp
    return 1 / parts - 1 / (train.pp * train.tp * train.shard), 1 / parts


#: Sort key of generation replicas; replicas of one training replica are adjacent.
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
