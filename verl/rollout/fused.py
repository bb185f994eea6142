"""A faster forward on CPU for Llama-shaped models: the same weights, without torch between them.

A step goes through all layers in one call of a compiled kernel (`forward.cpp`), which rounds where the operations of
the model round. Nothing is copied: the model's own parameters are read where they lie. A model is taken for
Llama-shaped if it is for training (see models/llama.py), and only if this forward then agrees with that one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from verl.models.kernels import Kernels, kernels
from verl.models.llama import is_llama_shaped, parts, spread_positions
from verl.models.packed import AttentionContext, PackedModel
from verl.rollout.attention import PagedAttention, Plan
from verl.rollout.kv_cache import KVCache

_PROBE = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
_AGREEMENT = {torch.bfloat16: 0.02, torch.float32: 1e-4}


def fused_forward(packed: PackedModel) -> FusedForward | None:
    """The fused forward of this model, or None where it has none."""
    compiled = kernels(packed.dtype, packed.device) if packed.is_fused else None
    if compiled is None or not is_llama_shaped(packed):
        return None
    tokens = torch.tensor([token % packed.vocab_size for token in _PROBE])
    positions = spread_positions(len(tokens), packed.max_positions)
    with torch.no_grad():
        recorder = _Recorder(packed)
        expected = packed.hidden(tokens, positions, recorder).double()
        if len(recorder.calls) != packed.num_layers:
            return None
        forward = FusedForward(packed, compiled, recorder.calls)
        if not forward.look_at_model():
            return None
        got = forward.hidden(tokens, positions, _Recorder(packed).attention).double()
    agrees = (got - expected).norm() <= _AGREEMENT[packed.dtype] * expected.norm()
    return forward if bool(agrees) else None


class FusedForward:
    """`hidden` is `PackedModel.hidden`; `calls[layer]` holds the scale and window of a layer's attention."""

    def __init__(self, packed: PackedModel, compiled: Kernels, calls: dict[int, tuple[float, int | None]]) -> None:
        self._packed = packed
        self._kernels = compiled
        self._calls = calls
        self._space = self._empty(0)

    def look_at_model(self) -> bool:
        """Note where the model's weights are: modules and parameters may have been replaced.

        Whether they still are what the kernel reads: without that `hidden` must not be called.
        """
        packed, backbone = self._packed, parts(self._packed.backbone)
        if not is_llama_shaped(packed) or not _is_plain(packed):
            return False
        self._weights = list(backbone.parameters())
        self._pointers = [weight.data_ptr() for weight in self._weights]
        layers = [_layer(layer, *self._calls[index]) for index, layer in enumerate(backbone.layers)]
        self._layers = (_Layer * len(layers))(*layers)
        weight, eps = backbone.norm.weight, backbone.norm.variance_epsilon
        inner: int = backbone.layers[0].mlp.gate_proj.out_features
        sizes = (packed.hidden_size, packed.num_heads, packed.num_kv_heads, packed.head_dim, inner)
        self._model = _Model(ctypes.addressof(self._layers), weight.data_ptr(), eps, len(layers), *sizes)
        return True

    def release(self) -> None:
        """Give back the memory that is kept from one step to the next."""
        self._space = self._empty(0)

    def _empty(self, tokens: int) -> tuple[Tensor, ...]:
        """Where results of a layer go, in the order of `_Step`; one set serves all layers and steps."""
        packed = self._packed
        queries, keys = packed.num_heads * packed.head_dim, packed.num_kv_heads * packed.head_dim
        widths = (packed.hidden_size, queries, keys, keys, queries)
        return tuple(torch.empty(tokens, width, dtype=packed.dtype) for width in widths)

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Final hidden states `[T, d]` of flat tokens `[T]` at `positions` `[T]`.

        Rows beyond the tokens of the context's plan are padding: what comes out for them is not defined.
        """
        assert isinstance(context, PagedAttention)
        moved = [weight.data_ptr() for weight in self._weights] != self._pointers
        if moved and not self.look_at_model():
            return self._packed.hidden(tokens, positions, context)
        backbone = parts(self._packed.backbone)
        x = backbone.embed_tokens(tokens)
        cos, sin = (part[0].contiguous() for part in backbone.rotary_emb(x[None], positions[None]))
        if len(self._space[0]) < len(tokens):
            self.release()
            self._space = self._empty(len(tokens))
        out = torch.empty_like(x)
        keys, values = context.cache.keys, context.cache.values
        pointers = (t.data_ptr() for t in (x, out, *self._space, cos, sin, keys, values))
        strides = (t.stride(0) * t.itemsize for t in (keys, values))
        self._model.rotary = cos.shape[1]
        step = _Step(*pointers, *strides, torch.get_num_threads())
        self._kernels.forward(ctypes.byref(self._model), ctypes.byref(step), context.compiled_plan.address)
        return out


class _Linear(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")


class _Layer(ctypes.Structure):
    """This and the following as in forward.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("norm", "second_norm")),
        *((name, _Linear) for name in _LINEARS),
        *((name, ctypes.c_double) for name in ("norm_eps", "second_norm_eps", "scale")),
        ("window", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "norm")),
        ("norm_eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "heads", "kv_heads", "head_dim", "inner", "rotary")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out", "delta", "query", "key", "value", "mixed", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("layer_keys", "layer_values", "threads")),
    ]


def _linear_modules(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


def _is_plain(packed: PackedModel) -> bool:
    """Whether weights are as the kernel takes for granted: rows without gaps, one dtype, every layer of one size."""
    backbone = parts(packed.backbone)
    hidden, queries, keys = packed.hidden_size, *(n * packed.head_dim for n in (packed.num_heads, packed.num_kv_heads))
    inner: int = backbone.layers[0].mlp.gate_proj.out_features
    sizes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    shaped = all([m.weight.shape for m in _linear_modules(layer)] == sizes for layer in backbone.layers)
    expected = (packed.dtype, packed.device)
    return shaped and all(w.is_contiguous() and (w.dtype, w.device) == expected for w in backbone.parameters())


def _layer(layer: Any, scale: float, window: int | None) -> _Layer:
    norms, modules = (layer.input_layernorm, layer.post_attention_layernorm), _linear_modules(layer)
    maps = [_Linear(m.weight.data_ptr(), None if m.bias is None else m.bias.data_ptr()) for m in modules]
    epsilons = [norm.variance_epsilon for norm in norms]
    return _Layer(*(norm.weight.data_ptr() for norm in norms), *maps, *epsilons, scale, window or 0)


class _Recorder:
    """A context over one fresh sequence that notes the scale and window of each layer."""

    def __init__(self, packed: PackedModel) -> None:
        cache = KVCache(1, packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype, packed.device)
        plan = Plan(packed.num_heads // packed.num_kv_heads)
        plan.add_prompt(_PROBE, 0, [0])
        self.attention = PagedAttention(cache, plan)
        self.calls: dict[int, tuple[float, int | None]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        self.calls[layer] = (scale, window)
        return self.attention.attend(layer, query, key, value, scale, window)
