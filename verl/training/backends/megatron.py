"""The training engine on Megatron-LM's layers. Only the model and its weights are Megatron's: rows, losses, metrics,
schedule and optimizer are the same as in every engine.

Shapes: T flat tokens, 1 Megatron's batch, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong
from torch.utils.checkpoint import checkpoint

from verl.errors import CheckpointError, ConfigError
from verl.models.log_probs import token_log_probs
from verl.models.packed import AttentionContext
from verl.training.engine import TrainEngine, WeightSource
from verl.training.forward import Forward
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import OptimConfig
from verl.training.parallel.data import replicate
from verl.training.parallel.pipeline import Pipeline, Stage
from verl.training.ranks import LocalWeights, Parallel, Ranks, WholeModel, gather_json
from verl.weights.shard import Shape, Shard, ShardedDim
from verl.weights.shards import fill_weights, model_shards, overlap

_EMBEDDING = "gpt.embedding.word_embeddings.weight"


class MegatronEngine(TrainEngine):
    """A `TrainEngine` of ranks that share a model: tensor and pipeline parallelism, and replicas of these.

    The model that is given is copied; its own tensors are not trained.

    Raises:
        ConfigError: megatron-core is not installed, or model, layout or options need another engine.
    """

    model: MegatronModel

    def assemble(self, source: WeightSource | None) -> None:
        forward, ranks, options = self.forward, self.ranks, self.options
        layout, original, whole = self.mesh.layout, self.model, WholeModel(self.model)
        number = self.mesh.coordinate(ranks.rank)["pp"]
        stage = Stage(number, layout.pp, forward.packed.hidden_size, forward.packed.dtype) if layout.pp > 1 else None
        model = MegatronModel(forward, ranks, stage, checkpointing=options.gradient_checkpointing)
        model.requires_grad_(options.trains)
        self.model = forward.model = forward.packed = model  # type: ignore[assignment]
        forward.is_padded = False
        self.weights = MegatronWeights(model, whole, ranks)
        self.weights.load((source or model_shards)(original))
        self.parallel = _parallel(forward, model, whole, ranks, stage)
        if options.trains:
            self.optimizer = MixedPrecisionOptimizer(dict(model.named_parameters()), options.optim or OptimConfig())

    def merged_shards(self) -> Iterator[Shard]:
        return self.shards()  # it has no adapters


def _parallel(forward: Forward, model: MegatronModel, whole: WholeModel, ranks: Ranks, stage: Stage | None) -> Parallel:
    """How the ranks share the model, for its optimizer steps."""
    layout = ranks.mesh.layout
    parallel = Parallel(ranks.mesh, cut_dims=tuple(dim for dim in ("pp", "tp") if getattr(layout, dim) > 1))
    # Without blocks all rows of this rank are padding of a vocabulary that is cut.
    parallel.shard_counts = {
        name: layout.tp for name, blocks in model.blocks.items() if not blocks or blocks[0].cut is not None
    }
    if stage is not None:
        if "lm_head.weight" in whole.shapes and "lm_head.weight" not in whole.dtypes:
            parallel.tied = frozenset((_EMBEDDING, "gpt.output_layer.weight"))
            for name, weight in model.named_parameters():
                if name in parallel.tied:
                    weight.tied_to = _EMBEDDING  # type: ignore[attr-defined]
        parallel.schedule = schedule = Pipeline(forward, stage, ranks, parallel.tied)
        parallel.reductions.append(schedule.agree)
    # A norm of heads is whole, and each rank uses it for its own heads.
    parallel.sum_over(
        ranks, lambda weight: ("tp",) if "q_layernorm" in weight.name or "k_layernorm" in weight.name else ()
    )
    if layout.replicate > 1:
        replicate(ranks, parallel, "replicate")
    return parallel


class MegatronWeights(LocalWeights):
    """The weights of the checkpoint in the parameters of Megatron's layers, which fuse and pad them."""

    keeps_memory = True  # a parameter holds several weights, or a part of one

    def __init__(self, model: MegatronModel, whole: WholeModel, ranks: Ranks) -> None:
        self._model, self._shapes, self.released = model, whole.shapes, {}
        #: Weight of the checkpoint -> the parameters here that have some of it, and what.
        self._owners: dict[str, list[tuple[str, Block]]] = {}
        for parameter, blocks in model.blocks.items():
            for block in blocks:
                self._owners.setdefault(block.name, []).append((parameter, block))
        is_cut = ranks.mesh.layout.tp > 1
        axes = {name: owners[-1][1].cut for name, owners in self._owners.items()}
        here = {
            name: (whole.dtypes[name], (ShardedDim("tp", axis),) if is_cut and axis is not None else ())
            for name, axis in axes.items()
        }
        self.specs = whole.specs(here, ranks)

    def shards(self) -> Iterator[Shard]:
        for name, weight in self._model.named_parameters():
            for block in self._model.blocks[name]:
                yield Shard(block.name, block.shape, block.offset, block.of(weight.detach()))

    def load(self, shards: Iterable[Shard]) -> None:
        weights = {name: weight.detach() for name, weight in self._model.named_parameters()}
        blocks = {
            name: [(block.offset, block.of(weights[parameter])) for parameter, block in owners]
            for name, owners in self._owners.items()
        }
        fill_weights(blocks, shards, self._shapes, {}, "model")

    def state_shards(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Shard]:
        weights = dict(self._model.named_parameters())
        for full_name, tensor in tensors:
            name, _, key = full_name.rpartition(".")
            if tensor.shape == weights[name].shape:
                for block in self._model.blocks[name]:
                    yield Shard(f"{block.name}.{key}", block.shape, block.offset, block.of(tensor))
            else:
                for weight in dict.fromkeys(block.name for block in self._model.blocks[name]):
                    yield Shard.whole(f"{weight}.{key}", tensor)

    def local_state(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """The optimizer's state under the names of Megatron's parameters: of each shard, what is here."""
        weights = {name: weight.detach() for name, weight in self._model.named_parameters()}
        padded: set[str] = set()
        for shard in shards:
            name, _, key = shard.name.rpartition(".")
            if name not in self._shapes:
                raise CheckpointError(f"the optimizer state '{shard.name}' belongs to no trained weight of this model")
            for parameter, block in self._owners.get(name, ()):  # none: it is on another stage
                full_name, weight = f"{parameter}.{key}", weights[parameter]
                if shard.global_shape != block.shape:  # one value for the whole weight
                    yield Shard(full_name, shard.global_shape, shard.offset, shard.tensor)
                    continue
                shape = tuple(weight.shape)
                part = overlap(block.offset, block.of(weight), shard)[1]
                low, end = block.rows or (0, shape[0])
                starts = [max(0, there - here) for here, there in zip(block.offset, shard.offset, strict=True)]
                yield Shard(full_name, shape, (low + starts[0], *starts[1:]), part)
                if block.pads and end < shape[0] and full_name not in padded:
                    padded.add(full_name)
                    zeros = shard.tensor.new_zeros(shape[0] - end, *shape[1:])
                    yield Shard(full_name, shape, (end, *(0,) * (len(shape) - 1)), zeros)


#: Weights of a layer that every tensor-parallel rank has whole: Megatron's name -> the checkpoint's.
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
#: Those of which a rank has columns.
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class Block:
    """A part of a weight of the checkpoint that is rows of a parameter of Megatron's.

    Attributes:
        name, shape: of the whole weight.
        offset: where the part begins in it.
        rows: of the parameter, the first and the one after the last; None: all.
        pads: rows of the parameter after these are padding, there to make the vocabulary's parts equal.
        cut: the dimension along which tensor-parallel ranks have other parts; None: all have this one.
    """

    name: str
    shape: Shape
    offset: Shape
    rows: tuple[int, int] | None = None
    cut: int | None = None
    pads: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is laid out like the parameter, on the same memory."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]


class MegatronModel(nn.Module):
    """This rank's part of a model on Megatron's layers. A `Forward` uses it as both its model and its `PackedModel`.
    Weights start at zero.

    Args:
        forward: of the transformers model, which is not kept and may have no weights.
        stage: this rank's pipeline stage; None: no pipeline.
        checkpointing: recompute activations of layers in the backward pass.

    Attributes:
        blocks: the parts of checkpoint weights in each parameter, by the parameter's name.

    Raises:
        ConfigError: megatron-core is not installed, or the model has weights or angles that it does not know.
    """

    supports_packed = True

    def __init__(self, forward: Forward, ranks: Ranks, stage: Stage | None, *, checkpointing: bool) -> None:
        super().__init__()
        source = forward.packed
        self.config, self.dtype, self.device = source.config, source.dtype, source.device
        self.vocab_size, self.position_table = source.vocab_size, source.position_table
        self._ranks, self._stage = ranks, stage
        self._at, self._size = ranks.mesh.coordinate(ranks.rank)["tp"], ranks.mesh.layout.tp
        self._prefix = f"{source.model.base_model_prefix}."
        self._is_tied = bool(source.model.config.tie_word_embeddings)
        is_lm, is_last = forward.head == "lm", stage is None or stage.is_last
        if self.device.type == "cpu":  # advice for CUDA
            warnings.filterwarnings("ignore", "When using async grad allreduce", UserWarning)
        self.gpt = _gpt_model(self.config, ranks, stage, is_tied=self._is_tied, head_dim=source.head_dim)
        if is_last and not is_lm:
            del self.gpt.output_layer
            self.score = copy.deepcopy(forward.model.score).to_empty(device=self.device)
        self.gpt.to(self.device, self.dtype)
        rotary: Any = source.backbone.rotary_emb
        self.register_buffer("_rates", rotary.inv_freq.to(self.device, torch.float32).clone(), persistent=False)
        for weight in self.parameters():
            nn.init.zeros_(weight)
        if checkpointing:
            for layer in self.gpt.decoder.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        self.blocks = {name: [*self._blocks(name, weight)] for name, weight in self.named_parameters()}
        known = {block.name for blocks in self.blocks.values() for block in blocks}
        known.update(*gather_json(sorted(known), ranks.group("pp")))
        known |= {"lm_head.weight"} if self._is_tied else set()
        if unknown := [name for name in forward.model.state_dict(keep_vars=True) if name not in known]:
            raise ConfigError(
                f"strategy 'megatron': Megatron's layers have no '{unknown[0]}', which {type(source.model).__name__} "
                "has: use 'ddp' or 'fsdp', which cut it just so"
            )
        self.eval()

    @property
    def model(self) -> MegatronModel:
        """Itself: what a `PackedModel` has under this name."""
        return self

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Final hidden states `[T, E]` of flat tokens `[T]` at `positions` `[T]`. A stage before the last returns its
        output, and keeps it in `Stage.outgoing`."""
        stage, decoder = self._stage, self.gpt.decoder
        embedded_T1E = self.gpt.embedding(tokens[None], None) if self.gpt.pre_process else None
        if stage is not None and stage.incoming is not None:
            decoder.set_input_tensor(stage.incoming.transpose(0, 1))
        angles = positions[:, None].float() * self._rates  # type: ignore[operator]
        angles_T11D = torch.cat([angles, angles], dim=-1)[:, None, None]
        # What Megatron hands down as a mask reaches our attention as it is.
        hidden_T1E: Tensor = decoder(hidden_states=embedded_T1E, attention_mask=context, rotary_pos_emb=angles_T11D)
        if stage is not None and not stage.is_last:
            stage.outgoing = hidden_T1E.transpose(0, 1)
        return hidden_T1E[:, 0]

    def log_probs(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """`token_log_probs` of `targets` `[N]` from hidden states `[N, E]`; takes the same options."""
        weight: Tensor = self.gpt.shared_embedding_or_output_weight() if self._is_tied else self.gpt.output_layer.weight
        if self._size > 1:  # without padding: each rank has rows of it
            start, stop = self._rows(self.vocab_size)
            weight = DTensor.from_local(
                weight[: stop - start],
                self._ranks.device_mesh(self.device, "tp"),
                [ShardedAlong(0)],
                run_check=False,
                shape=torch.Size((self.vocab_size, weight.shape[1])),
                stride=(weight.shape[1], 1),
            )
        return token_log_probs(hidden, weight, targets, **options)

    def _rows(self, size: int) -> tuple[int, int]:
        """This rank's part of a dimension, which is padded to equal parts: where it begins and ends."""
        each = -(-size // self._size)
        return min(self._at * each, size), min((self._at + 1) * each, size)

    def _blocks(self, name: str, weight: Tensor) -> Iterator[Block]:
        if name.startswith("score."):
            yield Block(name, tuple(weight.shape), (0,) * weight.dim())
        elif name.startswith("gpt.decoder.layers."):
            number, _, rest = name.removeprefix("gpt.decoder.layers.").partition(".")
            layer = self.gpt.decoder.layers[int(number)].layer_number - 1
            yield from self._layer_blocks(f"{self._prefix}layers.{layer}.", rest, weight)
        elif name == "gpt.decoder.final_layernorm.weight":
            yield Block(f"{self._prefix}norm.weight", tuple(weight.shape), (0,))
        else:
            is_head = name == "gpt.output_layer.weight" and not self._is_tied
            start, stop = self._rows(self.vocab_size)
            if stop > start:
                whole = "lm_head.weight" if is_head else f"{self._prefix}embed_tokens.weight"
                yield Block(whole, (self.vocab_size, weight.shape[1]), (start, 0), (0, stop - start), cut=0, pads=True)

    def _layer_blocks(self, prefix: str, name: str, weight: Tensor) -> Iterator[Block]:
        shape, rank, size = tuple(weight.shape), self._at, self._size
        if name in _WHOLE:
            yield Block(prefix + _WHOLE[name], shape, (0,) * len(shape))
        elif name in _COLUMNS:
            yield Block(prefix + _COLUMNS[name], (shape[0], shape[1] * size), (0, rank * shape[1]), cut=1)
        elif name == "mlp.linear_fc1.weight":  # the rank's rows of one, then of the other
            rows = shape[0] // 2
            for number, part in enumerate(("gate_proj", "up_proj")):
                here = (number * rows, (number + 1) * rows)
                yield Block(f"{prefix}mlp.{part}.weight", (rows * size, shape[1]), (rank * rows, 0), here, cut=0)
        elif kind := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", name):
            # For each key-value head: its query heads, the key, the value.
            settings = self.gpt.config
            width, groups = settings.kv_channels, settings.num_query_groups // self._size
            heads = settings.num_attention_heads // settings.num_query_groups
            rest, zeros = shape[1:], (0,) * (len(shape) - 1)
            for group in range(groups):
                start, index = group * (heads + 2) * width, rank * groups + group
                for part, count in (("q_proj", heads), ("k_proj", 1), ("v_proj", 1)):
                    rows = count * width
                    here, whole = (start, start + rows), (settings.num_query_groups * rows, *rest)
                    yield Block(f"{prefix}self_attn.{part}.{kind[1]}", whole, (index * rows, *zeros), here, cut=0)
                    start += rows
        else:
            raise ConfigError(f"strategy 'megatron': '{name}' of Megatron's layers has no name in the checkpoint")


class _PackedAttention(nn.Module):
    """Replaces Megatron's core attention by the attention context of packed rows."""

    def __init__(self, windows: list[int | None], *, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self._layer, self._scale = layer_number - 1, 1.0 / math.sqrt(config.kv_channels)
        self._window = windows[self._layer]

    def forward(self, q_T1HD: Tensor, k_T1KD: Tensor, v_T1KD: Tensor, context: AttentionContext, **_: Any) -> Tensor:
        """The attention output `[T, 1, H * D]`."""
        out_THD = context.attend(self._layer, q_T1HD[:, 0], k_T1KD[:, 0], v_T1KD[:, 0], self._scale, self._window)
        return out_THD.flatten(1)[:, None]


def _gpt_model(config: Any, ranks: Ranks, stage: Stage | None, *, is_tied: bool, head_dim: int) -> Any:
    """Megatron's model for a configuration of transformers, on the CPU, with this rank's part of the weights."""
    gpt_model, local_spec, settings_of, collection = _megatron()
    layout = ranks.mesh.layout
    is_first, is_last = stage is None or stage.number == 0, stage is None or stage.is_last
    normalised = config.model_type == "qwen3"
    settings = settings_of(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=normalised,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        cuda_graph_scope=[],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
    )
    spec = local_spec(qk_layernorm=normalised, normalization="RMSNorm")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    spec.submodules.self_attention.submodules.core_attention = partial(_PackedAttention, windows)
    alone = dist.new_group([ranks.rank], use_local_synchronization=True)
    groups = {dim: ranks.group(dim) or alone for dim in ("tp", "pp")}
    return gpt_model(
        settings,
        spec,
        vocab_size=-(-config.vocab_size // layout.tp) * layout.tp,
        max_sequence_length=config.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        # Across stages the head is a weight of its own, which `Pipeline` keeps equal to the embedding.
        share_embeddings_and_output_weights=is_tied and layout.pp == 1,
        position_embedding_type="none",
        pg_collection=collection(**groups, cp=alone, dp=alone, embd=None),
    )


def _megatron() -> tuple[Any, Any, Any, Any]:
    """megatron-core's GPT model, local layer spec, configuration and process groups. Importing it warns of Apex and
    Transformer Engine, which are not needed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.process_groups_config import ProcessGroupCollection
            from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise ConfigError("strategy 'megatron' needs Megatron-LM: pip install 'verl-hybrid[megatron]'") from error
    return GPTModel, get_gpt_layer_local_spec, TransformerConfig, ProcessGroupCollection
