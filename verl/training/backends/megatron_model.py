"""A model of transformers as Megatron-LM computes it: `GPTModel` of megatron-core, with its local layers.

Layers, embedding and head are Megatron's, cut over tensor-parallel ranks and stages as it cuts them. Three things are
ours: the attention between query, key and value, so that rows stay packed and share prompts (without Transformer
Engine, Megatron's own takes padded rows); the angles of the rotary embedding, which follow the positions of packed
tokens; and log-probs and entropies of the head, which never make a tokens x vocabulary matrix.

Shapes: T flat tokens, d hidden size, H query heads and K key-value heads of this rank, D head size.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong
from torch.utils.checkpoint import checkpoint

from verl.errors import ConfigError
from verl.models.log_probs import token_log_probs
from verl.models.packed import AttentionContext
from verl.training.forward import Forward
from verl.training.parallel.stages import Stage
from verl.training.ranks import Ranks, gather_json

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
        pads: rows of the parameter after these are padding.
        cut: the dimension along which tensor-parallel ranks have other parts; None: all have this one.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    rows: tuple[int, int] | None = None
    cut: int | None = None
    pads: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is laid out like the parameter, on the same memory."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]

    def local_offset(self, offset: tuple[int, ...]) -> tuple[int, ...]:
        """Where in the parameter what begins at `offset` of the whole weight stands, as far as it is in this part."""
        starts = [max(0, there - here) for here, there in zip(self.offset, offset, strict=True)]
        return (starts[0] + (0 if self.rows is None else self.rows[0]), *starts[1:])

    def padding(self, shape: tuple[int, ...]) -> int | None:
        """The first row of a parameter of this shape that is there to make the vocabulary's parts equal, if any is."""
        return self.rows[1] if self.pads and self.rows is not None and self.rows[1] < shape[0] else None


class MegatronModel(nn.Module):
    """This rank's part of a model, in the place of model and `PackedModel` of a `Forward`. Its weights are zero.

    Args:
        forward: of the model of transformers, which is not kept and may be without weights.
        stage: where this rank stands in a pipeline; None: there is none.
        checkpointing: compute activations of layers again in the backward pass.

    Attributes:
        blocks: what of the checkpoint each parameter has, by the parameter's name.

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
        self.gpt.to(self.device, self.dtype)
        self.score = copy.deepcopy(forward.model.score).to_empty(device=self.device) if is_last and not is_lm else None
        rotary: Any = source.backbone.rotary_emb
        self.register_buffer("_rates", rotary.inv_freq.to(self.device, torch.float32).clone(), persistent=False)
        for weight in self.parameters():
            nn.init.zeros_(weight)
        if checkpointing:
            for layer in self.gpt.decoder.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        self._shapes = {name: tuple(weight.shape) for name, weight in forward.model.state_dict(keep_vars=True).items()}
        self.blocks = {name: [*self._blocks(name, weight)] for name, weight in self.named_parameters()}
        known = {block.name for blocks in self.blocks.values() for block in blocks}
        known.update(*gather_json(sorted(known), ranks.group("pp")))
        if unknown := [n for n in self._shapes if n not in known and not (self._is_tied and n == "lm_head.weight")]:
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
        """Final hidden states `[T, d]` of flat tokens `[T]` at `positions` `[T]`; on a stage before the last, what
        leaves it, which the stage is given too."""
        stage, decoder = self._stage, self.gpt.decoder
        embedded = self.gpt.embedding(tokens[None], None) if self.gpt.pre_process else None
        if stage is not None and stage.incoming is not None:
            decoder.set_input_tensor(stage.incoming.transpose(0, 1))
        angles = positions[:, None].float() * self._rates  # type: ignore[operator]
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        # What Megatron hands down as a mask reaches our attention as it is.
        hidden: Tensor = decoder(hidden_states=embedded, attention_mask=context, rotary_pos_emb=angles)
        if stage is not None and not stage.is_last:
            stage.outgoing = hidden.transpose(0, 1)
        return hidden[:, 0]

    def log_probs(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """`token_log_probs` of `targets` `[N]`, given hidden states `[N, d]`; options are those of that."""
        return token_log_probs(hidden, self._head(), targets, **options)

    def predict(self, hidden: Tensor) -> Tensor:
        """Values or scores `[N]` for hidden states `[N, d]`."""
        assert self.score is not None
        values: Tensor = self.score(hidden)
        return values

    def cut(self, name: str) -> int | None:
        """The dimension along which ranks have other parts of a parameter."""
        return self.blocks[name][0].cut if self.blocks[name] else 0  # all rows of a rank may be padding

    def _head(self) -> Tensor:
        """The output weight without its padding: a DTensor where ranks have rows of it."""
        weight: Tensor = self.gpt.shared_embedding_or_output_weight() if self._is_tied else self.gpt.output_layer.weight
        if self._size == 1:
            return weight
        start, stop = self._rows(self.vocab_size)
        return DTensor.from_local(
            weight[: stop - start],
            self._ranks.device_mesh(self.device, "tp"),
            [ShardedAlong(0)],
            run_check=False,
            shape=torch.Size((self.vocab_size, weight.shape[1])),
            stride=(weight.shape[1], 1),
        )

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
    """In the place of Megatron's attention between query, key and value: the context of packed rows."""

    def __init__(self, windows: list[int | None], *, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self._layer, self._scale = layer_number - 1, 1.0 / math.sqrt(config.kv_channels)
        self._window = windows[self._layer]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, **_: Any) -> Tensor:
        """query `[T, 1, H, D]`, key and value `[T, 1, K, D]` -> `[T, 1, H * D]`."""
        mixed = context.attend(self._layer, query[:, 0], key[:, 0], value[:, 0], self._scale, self._window)
        return mixed.flatten(1)[:, None]


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
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cuda_graph_scope=[],
        params_dtype=torch.float32,
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
    """What is used of megatron-core: its model, the specification of its local layers, their settings, and the record
    of process groups. It warns of Apex and Transformer Engine, which are not needed."""
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
