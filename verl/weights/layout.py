"""How a model is laid out over ranks: sizes by dimension (`Layout`), and the ranks that have them (`Mesh`).

Ranks are numbered row-major over `DIMS`: tensor-parallel ranks are neighbours, pipeline stages furthest apart.
Ranks that differ only in `pp`, `sp` or `tp` hold parts of one model and get the same rows; `replicate`, `shard` and
`ep` are the data-parallel dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, combinations
from typing import Any

from verl._base.combinations import MAKE, check, named
from verl._base.names import check_known
from verl.errors import ConfigError, shown

#: The dimensions of a layout, outermost first: pipeline, replicas, fully sharded, sequence, expert, tensor.
DIMS = ("pp", "replicate", "shard", "sp", "ep", "tp")
#: Along these, ranks get different rows.
DATA_DIMS = ("replicate", "shard", "ep")
#: How a placement may have a role's ranks share its model -> the dimension that they are along; "data": those
#: that the role's settings leave.
PARALLEL = {"data": "", "tensor": "tp", "pipeline": "pp", "sequence": "sp", "expert": "ep"}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that layouts depend on; a count of 0, or no kind, is unknown and not checked.

    Attributes:
        kind: `model_type` of transformers.
        plan: how transformers cuts it by tensor parallelism, if it does.
        intermediate: width of a layer's inner activations.
        not_megatron: what Megatron-LM's layers lack to compute it; empty: nothing that the configuration shows.
        adapters: whether it has adapters (LoRA).
        adapts_experts: whether stacked experts have some.
        dtypes: of its weights.
        trained: whether its weights are trained: all, none, or some and others not.
        not_trainable: a dtype that is trained here and cannot be.
        no_recomputation: its class, if that has no gradient checkpointing.
    """

    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    kind: str = ""
    plan: Mapping[str, str] | None = None
    intermediate: int = 0
    not_megatron: str = ""
    adapters: bool = False
    adapts_experts: bool = False
    dtypes: tuple[str, ...] = ()
    trained: frozenset[bool] = frozenset({True})
    not_trainable: str = ""
    no_recomputation: str = ""

    @classmethod
    def of(cls, config: Any, *, adapters: bool = False, **of_weights: Any) -> ModelShape:
        """The shape of a model of transformers, by its configuration and what else is known of it."""
        text = config.get_text_config()
        return cls(
            layers=count_of(text, "num_hidden_layers"),
            heads=count_of(text, "num_attention_heads"),
            kv_heads=count_of(text, "num_key_value_heads", "num_attention_heads"),
            experts=count_of(text, "num_experts", "num_local_experts", "n_routed_experts"),
            kind=text.model_type,
            plan=getattr(text, "base_model_tp_plan", None),
            intermediate=count_of(text, "intermediate_size"),
            not_megatron=_not_megatron(text),
            adapters=adapters,
            **of_weights,
        )

    def asked(self) -> dict[str, str]:
        """What the model is, as `verl._base.combinations` names it."""
        dtype = self.dtypes[0] if len(self.dtypes) == 1 else "several dtypes" * bool(self.dtypes)
        return named({
            dtype: " and ".join(self.dtypes),
            "adapters": "adapters (LoRA)" * self.adapters,
            "adapted experts": "experts with adapters" * self.adapts_experts,
            "not Megatron": self.not_megatron,
            "other dtype": self.not_trainable,
            "no recomputation": self.no_recomputation,
        })  # fmt: skip


def count_of(config: Any, *names: str) -> int:
    """The first of some counts that a configuration of transformers has; where layers have different ones, what divides
    all of them; 0: it has none."""
    by_layer = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_attributes", ())
    for name in names:
        configs = [*config.per_layer_config] if name in by_layer else [config]
        values = [getattr(one, name, None) for one in configs]
        counts = values[0] if isinstance(values[0], list | tuple) else values
        if count := math.gcd(*(int(one or 0) for one in counts)):
            return count
    return 0


@dataclass(frozen=True)
class Layout:
    """Ranks along each dimension. The default is one rank.

    Raises:
        ConfigError: a size is no whole number from 1 on.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    sp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"layout: {field.name} is a number of ranks, at least 1, not {shown(size)}")

    @property
    def sizes(self) -> dict[str, int]:
        """By dimension, in the order of `DIMS`."""
        return {dim: getattr(self, dim) for dim in DIMS}

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    @property
    def is_plain(self) -> bool:
        """Whether every rank has the whole model and runs it by itself."""
        return self.size == self.replicate

    @property
    def shown(self) -> str:
        """The dimensions of several ranks, for messages."""
        named = (f"{dim} {size}" for dim, size in self.sizes.items() if size > 1)
        return f"on {self.size} ranks ({', '.join(named)})" if self.size > 1 else "on 1 rank"

    @property
    def data_size(self) -> int:
        """Parts that the rows of a batch are split into."""
        return math.prod(getattr(self, dim) for dim in DATA_DIMS)

    def index(self, coordinate: Mapping[str, int], dims: Sequence[str] = DIMS) -> int:
        """The number of a place among those that differ along `dims`, row-major."""
        index = 0
        for dim in dims:
            index = index * getattr(self, dim) + coordinate[dim]
        return index

    def asked(self, strategy: str = "") -> dict[str, str]:
        """The layout, and the back end that trains in it under a strategy, as `verl._base.combinations` names them."""
        is_zero, name = strategy == "deepspeed" and self.size > 1, f"strategy '{strategy}'"
        return named({
            **{dim: f"{dim}={size}" * (size > 1) for dim, size in self.sizes.items()},
            "ZeRO": name * is_zero,
            "ZeRO 3": f"{name}: ZeRO of stage 3" * (is_zero and self.shard > 1),
            "Megatron": name * (strategy == "megatron" and not self.is_plain),
            "parts": MAKE * (not self.is_plain),
        })  # fmt: skip

    def check(self, shape: ModelShape, strategy: str = "") -> None:
        """Refuse a layout that the model cannot have under a training strategy.

        Raises:
            ConfigError: names the dimension, the model's count and what would fit.
        """
        if shape.layers and self.pp > shape.layers:
            raise ConfigError(f"layout: pp={self.pp} leaves a stage without layers: the model has {shape.layers}")
        for dim, size in (("tp", self.tp), ("sp", self.sp), ("tp x sp", self.tp * self.sp)):
            if shape.heads and shape.heads % size:
                raise ConfigError(f"layout: {dim}={size} does not divide the model's {shape.heads} attention heads")
        if self.tp > 1 and shape.kind:
            tensor_plan(shape.kind, shape.plan)
        if shape.kv_heads and shape.kv_heads % self.tp:
            raise ConfigError(f"layout: tp={self.tp} does not divide the model's {shape.kv_heads} key-value heads")
        if self.ep > 1 and (not shape.experts or shape.experts % self.ep):
            raise ConfigError(f"layout: ep={self.ep} does not divide the model's {shape.experts} experts")
        asked = self.asked(strategy)
        check(asked | shape.asked())
        if "Megatron" in asked:
            if shape.layers % self.pp:
                raise ConfigError(
                    f"strategy 'megatron': its stages have equally many layers, and pp={self.pp} does not divide the "
                    f"model's {shape.layers}: use 'ddp' or 'fsdp'"
                )
            if shape.intermediate % self.tp:
                raise ConfigError(f"layout: tp={self.tp} does not divide the intermediate size {shape.intermediate}")


@dataclass(frozen=True)
class Mesh:
    """A layout on an ordered tuple of world ranks. Two meshes of a role may hold the same ranks in another order.

    Raises:
        ConfigError: there are more or fewer ranks than the layout has places, or one is named twice.
    """

    ranks: tuple[int, ...] = (0,)
    layout: Layout = Layout()

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.size or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(f"layout: {self.layout} needs {self.layout.size} different ranks, got {list(self.ranks)}")

    @property
    def size(self) -> int:
        return len(self.ranks)

    def check_order(self) -> None:
        """Refuse what process groups of the ranks would confuse: torch numbers the ranks of a group in ascending order.
        Replicas may have any order, since what goes between them is summed.

        Raises:
            ConfigError: ranks along another dimension do not ascend.
        """
        stride = 1
        for dim, size in reversed(self.layout.sizes.items()):
            for index, (low, high) in enumerate(zip(self.ranks, self.ranks[stride:], strict=False)):
                if low > high and index // stride % size < size - 1 and dim != "replicate":
                    raise ConfigError(
                        f"layout: rank {low} comes before rank {high} along {dim} in {list(self.ranks)}: process "
                        "groups number their ranks in ascending order, so they have to ascend along this dimension"
                    )
            stride *= size

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank of the mesh stands along each dimension."""
        rest, along = self.ranks.index(rank), {}
        for dim, size in reversed(self.layout.sizes.items()):
            rest, along[dim] = divmod(rest, size)
        return {dim: along[dim] for dim in DIMS}

    def rows(self, rank: int) -> tuple[int, int] | None:
        """Data-parallel index of a rank, and how many there are; None for a rank outside of the mesh."""
        if rank not in self.ranks:
            return None
        return self.layout.index(self.coordinate(rank), DATA_DIMS), self.layout.data_size

    def answers(self, rank: int) -> bool:
        """Whether a rank's answer counts: of those with the same rows, the first of the last pipeline stage."""
        if rank not in self.ranks:
            return False
        coordinate = self.coordinate(rank)
        return coordinate["pp"] == self.layout.pp - 1 and coordinate["sp"] == 0 and coordinate["tp"] == 0

    def answering(self) -> tuple[int, ...]:
        """The ranks that answer, by data-parallel index."""
        by_index = {self.rows(rank): rank for rank in self.ranks if self.answers(rank)}
        return tuple(by_index[index, self.layout.data_size] for index in range(self.layout.data_size))

    def parts(self) -> list[tuple[int, ...]]:
        """All groups of several ranks, but not of all, that differ only along some dimensions; ranks ascending."""
        coordinates = {rank: self.coordinate(rank) for rank in self.ranks}
        wide = [dim for dim, size in self.layout.sizes.items() if size > 1]
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for fixed in chain.from_iterable(combinations(wide, count) for count in range(1, len(wide))):
            for rank in sorted(self.ranks):
                groups.setdefault(tuple((dim, coordinates[rank][dim]) for dim in fixed), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def group(self, rank: int, *dims: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `dims`, in the order of the mesh.

        Raises:
            ConfigError: there is no such dimension.
        """
        check_known("layout: there is no dimension", dims, DIMS)
        here = self.coordinate(rank)
        fixed = [dim for dim in DIMS if dim not in dims]
        return tuple(r for r in self.ranks if all(self.coordinate(r)[dim] == here[dim] for dim in fixed))


#: Kinds of models that Megatron-LM's layers compute.
_MEGATRON_KINDS = ("llama", "qwen2", "qwen3")


def _not_megatron(text: Any) -> str:
    """The settings of a transformers configuration that Megatron-LM's layers do not compute."""
    if text.model_type not in _MEGATRON_KINDS:
        return f"model of kind '{text.model_type}', only {', '.join(_MEGATRON_KINDS)}"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(text, name, False):
            return f"{name}"
    if text.hidden_act != "silu":
        return f"activation '{text.hidden_act}', only silu"
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    return "" if kind in ("default", "linear", "llama3") else f"rotary embedding of type '{kind}'"


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
    if tg < 1 or (layout.tp % tg and (layout.tp > 1 or layout.shard % tg)):
        raise ConfigError(
            f"generation: tp={tg} does not divide the {layout.tp} tensor-parallel ranks of training"
            + (f", nor its {layout.shard} shards" if layout.tp == 1 and layout.shard > 1 else "")
        )
    if pg < 1 or layout.pp % pg:
        raise ConfigError(f"generation: pp={pg} does not divide the {layout.pp} pipeline stages of training")
    cut = "shard" if layout.tp % tg else "tp"

    def place(rank: int) -> tuple[int, list[int], int]:
        """The stage of a rank, its replica (adjacent within a training replica), and its part."""
        coordinate = train.coordinate(rank)
        stage, in_stage = divmod(coordinate["pp"], layout.pp // pg)
        part, between = divmod(coordinate[cut], getattr(layout, cut) // tg)
        replica = {**coordinate, "pp": in_stage, cut: between}
        return stage, [replica[dim] for dim in ("replicate", "shard", "sp", "ep", "pp", "tp")], part

    return Mesh(tuple(sorted(train.ranks, key=place)), Layout(pp=pg, replicate=train.size // (pg * tg), tp=tg))


def transition_shares(train: Layout, generation: Layout) -> tuple[float, float]:
    """What each rank receives before a rollout and then holds, as shares of the bytes of weights that tensor and
    pipeline parallelism cut evenly (table 2 of the paper). With FSDP the shards are smaller by `shard`, and so much
    more is received."""
    parts = generation.pp * generation.tp
    return 1 / parts - 1 / (train.pp * train.tp * train.shard), 1 / parts


#: What each rank has of a linear map: outputs or inputs; of fused matrices, outputs of each.
STYLES = (
    "colwise",
    "colwise_gather_output",
    "packed_colwise",
    "fused_qkv",
    "rowwise",
    "rowwise_split_input",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
    "gpt2_attention",
)
#: For kinds of models of which transformers has none.
_PLANS = {
    "gpt2": {
        "h.*.attn": "gpt2_attention",
        "h.*.attn.c_attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}


def tensor_plan(kind: str, of_transformers: Mapping[str, str] | None) -> dict[str, str]:
    """The plan for a kind of model (`model_type`), `of_transformers` (`base_model_tp_plan`) if that has one, or ours.

    Raises:
        ConfigError: there is none, or one with a style that is unknown here.
    """
    plan = of_transformers or _PLANS.get(kind)
    if not plan:
        raise ConfigError(
            f"layout: tp does not cut models of type '{kind}': transformers has no tensor-parallel plan for them. "
            "Use shard (FSDP) or pp"
        )
    plan = {name: style for name, style in plan.items() if not style.startswith("embedding")}
    if unknown := sorted(set(plan.values()) - set(STYLES)):
        raise ConfigError(
            f"layout: tp does not cut models of type '{kind}': their plan has styles unknown here, "
            f"{', '.join(unknown)}. Use shard (FSDP) or pp"
        )
    return plan
