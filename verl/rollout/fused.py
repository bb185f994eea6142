"""A faster forward on CPU for Llama-shaped models: the same weights, without transformers' elementwise passes.

In bf16 on CPU the norms, rotations and activations of a step cost as much as its matrix products when each is a chain
of torch operations. Here each is one kernel, rounding where the operations of the model round. Nothing is copied:
the model's own parameters are read at every call. A model is taken for Llama-shaped by its modules' names, and
only if this forward then agrees with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from verl.models.kernels import Kernels, Weights, gated_linear, kernels, linear, linears
from verl.models.llama import is_llama_shaped, parts
from verl.models.packed import AttentionContext, PackedModel
from verl.rollout.attention import PagedAttention, Plan
from verl.rollout.kv_cache import KVCache

_PROBE = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
_AGREEMENT = {torch.bfloat16: 0.02, torch.float32: 1e-4}


def fused_forward(packed: PackedModel) -> FusedForward | None:
    """The fused forward of this model, or None where it has none."""
    compiled = kernels(packed.dtype, packed.device) if packed.fused_kernels else None
    if compiled is None or not compiled.elementwise or not is_llama_shaped(packed):
        return None
    tokens = torch.tensor([token % packed.vocab_size for token in _PROBE])
    with torch.no_grad():
        recorder = _Recorder(packed)
        expected = packed.hidden(tokens, torch.arange(len(tokens)), recorder).double()
        if len(recorder.calls) != packed.num_layers:
            return None
        forward = FusedForward(packed, compiled, recorder.calls)
        got = forward.hidden(tokens, torch.arange(len(tokens)), _Recorder(packed)).double()
    agrees = (got - expected).norm() <= _AGREEMENT[packed.dtype] * expected.norm()
    return forward if bool(agrees) else None


class FusedForward:
    """`hidden` is `PackedModel.hidden`; `calls[layer]` holds the scale and window of a layer's attention."""

    def __init__(self, packed: PackedModel, compiled: Kernels, calls: dict[int, tuple[float, int | None]]) -> None:
        self._packed = packed
        self._kernels = compiled
        self._calls = calls
        self._space = _Space.of(0, packed)
        self.look_at_model()

    def look_at_model(self) -> None:
        """Note where the model's weights are: modules and parameters may have been replaced."""
        layers = parts(self._packed.backbone).layers
        self._layers = [_Layer.of(layer, *self._calls[index]) for index, layer in enumerate(layers)]

    def release(self) -> None:
        """Give back the memory that is kept from one step to the next."""
        self._space = _Space.of(0, self._packed)

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Final hidden states `[T, d]` of flat tokens `[T]` at `positions` `[T]`."""
        packed, backbone = self._packed, parts(self._packed.backbone)
        x = backbone.embed_tokens(tokens)
        cos, sin = (part[0].contiguous() for part in backbone.rotary_emb(x[None], positions[None]))
        if len(self._space.normed) < len(tokens):
            self.release()
            self._space = _Space.of(len(tokens), packed)
        space = self._space.first(len(tokens))
        delta = None
        for index, layer in enumerate(self._layers):
            self._kernels.rms_norm(x, delta, *layer.norm, space.normed)
            linears(space.normed, layer.projections, (space.q, space.k, space.v))
            self._kernels.rotate(space.q, cos, sin)
            self._kernels.rotate(space.k, cos, sin)
            mixed = context.attend(index, space.q, space.k, space.v, layer.scale, layer.window)
            delta = linear(mixed.flatten(1), *layer.output, space.delta)
            self._kernels.rms_norm(x, delta, *layer.second_norm, space.normed)
            gated_linear(space.normed, layer.gate, layer.up, space.gated)
            linear(space.gated, *layer.down, delta)
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, delta, *_norm(backbone.norm), out)
        return out


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's parameters; to find them through its modules takes longer than some of the kernels."""

    norm: tuple[Tensor, float]
    projections: tuple[Weights, ...]
    output: Weights
    second_norm: tuple[Tensor, float]
    gate: Weights
    up: Weights
    down: Weights
    scale: float
    window: int | None

    @classmethod
    def of(cls, layer: Any, scale: float, window: int | None) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        linear_modules = (
            *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        )
        q, k, v, output, gate, up, down = ((module.weight, module.bias) for module in linear_modules)
        second_norm = _norm(layer.post_attention_layernorm)
        return cls(_norm(layer.input_layernorm), (q, k, v), output, second_norm, gate, up, down, scale, window)


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


@dataclass(frozen=True)
class _Space:
    """Where the results of a layer go; one set serves all layers and steps. Heads are `[T, H, D]`, others `[T, d]`."""

    normed: Tensor
    delta: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gated: Tensor

    @classmethod
    def of(cls, tokens: int, packed: PackedModel) -> _Space:
        size, keys = packed.head_dim, packed.num_kv_heads
        inner: int = parts(packed.backbone).layers[0].mlp.gate_proj.out_features
        shapes = ((packed.hidden_size,),) * 2 + ((packed.num_heads, size), (keys, size), (keys, size), (inner,))
        return cls(*(torch.empty(tokens, *shape, dtype=packed.dtype) for shape in shapes))

    def first(self, tokens: int) -> _Space:
        """The room of the first so many tokens."""
        return _Space(*(getattr(self, field.name)[:tokens] for field in fields(self)))


class _Recorder:
    """A context over one fresh sequence that notes the scale and window of each layer."""

    def __init__(self, packed: PackedModel) -> None:
        cache = KVCache(1, packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype, packed.device)
        plan = Plan(packed.num_heads // packed.num_kv_heads)
        plan.add_prompt(_PROBE, 0, [0])
        self._attention = PagedAttention(cache, plan)
        self.calls: dict[int, tuple[float, int | None]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.calls[layer] = (scale, window)
        return self._attention.attend(layer, query, key, value, scale, window)
