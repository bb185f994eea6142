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

from verl.models.kernels import Kernels, gated_linear, kernels, linear, linears
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
        for index, layer in enumerate(backbone.layers):
            delta = self._layer(index, layer, x, delta, cos, sin, space, context)
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, delta, backbone.norm.weight, backbone.norm.variance_epsilon, out)
        return out

    def _layer(
        self,
        index: int,
        layer: Any,
        x: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        space: _Space,
        context: AttentionContext,
    ) -> Tensor:
        """Adds `delta` and the attention to `x`; what the feed-forward part adds is returned, for the next norm."""
        attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
        self._kernels.rms_norm(x, delta, norm.weight, norm.variance_epsilon, space.normed)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        mapped = (space.q, space.k, space.v)
        linears(space.normed, [(module.weight, module.bias) for module in projections], mapped)
        heads = [part.unflatten(1, (-1, self._packed.head_dim)) for part in mapped]
        self._kernels.rotate(heads[0], cos, sin)
        self._kernels.rotate(heads[1], cos, sin)
        mixed = context.attend(index, heads[0], heads[1], heads[2], *self._calls[index])
        linear(mixed.flatten(1), attention.o_proj.weight, attention.o_proj.bias, space.delta)
        norm = layer.post_attention_layernorm
        self._kernels.rms_norm(x, space.delta, norm.weight, norm.variance_epsilon, space.normed)
        gate, up = mlp.gate_proj, mlp.up_proj
        gated_linear(space.normed, (gate.weight, gate.bias), (up.weight, up.bias), space.gated)
        return linear(space.gated, mlp.down_proj.weight, mlp.down_proj.bias, space.delta)


@dataclass(frozen=True)
class _Space:
    """Where the results of a layer go; one set serves all layers and steps. Each is `[T, its width]`."""

    normed: Tensor
    delta: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gated: Tensor

    @classmethod
    def of(cls, tokens: int, packed: PackedModel) -> _Space:
        hidden, query, key = (
            packed.hidden_size,
            packed.num_heads * packed.head_dim,
            packed.num_kv_heads * packed.head_dim,
        )
        inner: int = parts(packed.backbone).layers[0].mlp.gate_proj.out_features
        widths = (hidden, hidden, query, key, key, inner)
        return cls(*(torch.empty(tokens, width, dtype=packed.dtype) for width in widths))

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
