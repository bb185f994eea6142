"""Llama-shaped models with compiled elementwise parts: the same weights and formulas, in fewer passes over memory.

In bf16 on CPU the norms, rotations and activations of a layer cost as much as its matrix products when each is a chain
of torch operations, and autograd keeps the result of every link. Here a layer is two functions around its attention.
For the backward they keep 2 d numbers a token (the layer's two residual states), the heads of query, key, value and
attention output, and 2 I (gate and up projection); norms and the gated product are recomputed.

A model is taken for Llama-shaped by its modules' names and sizes, and only if each layer of this forward then agrees
with its own, at positions up to its longest.

Legend: T flat tokens, d hidden size, I intermediate size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from verl._base.autograd import embedding, give
from verl.kernels.compiled import VECTOR, Kernels, layer_kernels

if TYPE_CHECKING:
    from verl.attention.segments import Packed
    from verl.models.packed import AttentionContext, PackedModel

# Of one layer, where both round alike: measured 5e-4 and 2e-6 at most.
_TOLERANCE = {torch.bfloat16: 0.01, torch.float32: 1e-4}
# Root mean square of a layer's input where layers are compared.
_SMALL = 0.01
_LINEARS = (
    *(("self_attn", name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(("mlp", name) for name in ("gate_proj", "up_proj", "down_proj")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
# What a layer's forward here reads; an adapter or a norm of heads beside it would be left out, and never trained.
_PARAMETERS = frozenset(
    f"{name}.{kind}" for name in (*map(".".join, _LINEARS), *_NORMS) for kind in ("weight", "bias")
) - {f"{name}.bias" for name in _NORMS}


@dataclass(eq=False)
class FusedLayers:
    """The forward of a Llama-shaped backbone, differentiable once."""

    _packed: PackedModel
    _kernels: Kernels
    #: Scale and window of each layer's attention.
    _calls: dict[int, tuple[float, int | None]]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        packed: PackedModel,
        calls: dict[int, tuple[float, int | None]],
        tokens: Tensor,
        flat: Packed,
        expected: Tensor,
    ) -> FusedLayers | None:
        """The fused forward of this model, or None if it has another shape, device or dtype, or if `tokens` `[T]`, laid
        out as `flat`, do not give the `expected` hidden states."""
        compiled = layer_kernels(packed.dtype, packed.device)
        if compiled is None or not has_llama_shape(packed.backbone, packed.head_dim):
            return None
        fused = cls(packed, compiled, calls)
        if not fused._agrees(tokens, flat.context):
            return None
        both = (forward(tokens, flat.positions, flat.context) for forward in (fused.hidden, fused.with_gradient))
        return fused if all(is_close(hidden, expected) for hidden in both) else None

    def _agrees(self, tokens: Tensor, context: AttentionContext) -> bool:
        """Whether each layer gives the same result as the model's own code for `tokens` `[T]`.

        Layers are compared one by one, so that rounding does not accumulate. Inputs are scaled down: a large residual
        would hide an error of a layer.
        """
        backbone: Any = self._packed.backbone
        # Up to the model's last position: some behaviour starts beyond some length.
        last = max(len(tokens), self._packed.max_positions or 0) - 1
        positions = torch.linspace(0, last, len(tokens), dtype=torch.float64).long().to(tokens.device)
        calls = _layer_calls(self._packed, tokens, positions, context)
        if [index for index, *_ in calls] != list(range(len(backbone.layers))):
            return False
        if not torch.equal(calls[0][1], backbone.embed_tokens.weight[tokens]):
            return False
        cos, sin = (part[0].contiguous() for part in backbone.rotary_emb(calls[0][1][None], positions[None]))
        for index, x, options in calls:
            x = x * (_SMALL / x.float().square().mean().sqrt().clamp(min=_SMALL)).to(x.dtype)
            theirs, ours = AttentionRecorder(context), AttentionRecorder(context)
            output = backbone.layers[index](x[None], **{**options, "packed": theirs})
            want = output[0] if isinstance(output, Tensor) else output[0][0]
            got = self._layer(index, backbone.layers[index], x, cos, sin, ours)
            pairs = zip([*ours.inputs, got], [*theirs.inputs, want], strict=True)
            if not all(is_close(a, b, _TOLERANCE[b.dtype]) for a, b in pairs):
                return False
        return True

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Final hidden states `[T, d]` of flat tokens `[T]` at `positions` `[T]`. Does not check the model's shape: see
        `has_llama_shape`.

        Without a gradient there are fewer calls between the products, and every result is in memory that is used again.
        """
        if torch.is_grad_enabled():
            return self.with_gradient(tokens, positions, context)
        compiled, packed = self._kernels, self._packed
        backbone: Any = packed.backbone
        x = backbone.embed_tokens.weight.index_select(0, tokens)
        cos, sin = (part[0].contiguous() for part in backbone.rotary_emb(x[None], positions[None]))
        normed, delta = torch.empty_like(x), None
        for index, layer in enumerate(backbone.layers):
            attention, mlp = layer.self_attn, layer.mlp
            norm = layer.input_layernorm
            compiled.rms_norm(x, delta, norm.weight, normed, *x.shape, norm.variance_epsilon)
            q_THD, k_TKD, v_TKD = (
                linear(normed, m.weight, m.bias).view(tokens.shape[0], -1, packed.head_dim)
                for m in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            compiled.rotate(q_THD, cos, sin, *q_THD.shape, cos.shape[1])
            compiled.rotate(k_TKD, cos, sin, *k_TKD.shape, cos.shape[1])
            mixed = context.attend(index, q_THD, k_TKD, v_TKD, *self._calls[index]).view(tokens.shape[0], -1)
            delta, norm = linear(mixed, attention.o_proj.weight, attention.o_proj.bias), layer.post_attention_layernorm
            compiled.rms_norm(x, delta, norm.weight, normed, *x.shape, norm.variance_epsilon)
            gate, up = (linear(normed, m.weight, m.bias) for m in (mlp.gate_proj, mlp.up_proj))
            compiled.silu_mul(gate, up, gate, gate.numel())
            delta = linear(gate, mlp.down_proj.weight, mlp.down_proj.bias)
        compiled.rms_norm(x, delta, backbone.norm.weight, normed, *x.shape, backbone.norm.variance_epsilon)
        return normed

    def with_gradient(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """`hidden` by functions that autograd knows."""
        backbone: Any = self._packed.backbone
        x = embedding(backbone.embed_tokens.weight, tokens)
        cos, sin = (part[0].contiguous() for part in backbone.rotary_emb(x[None], positions[None]))
        first = backbone.layers[0]
        keeps_little = first.training and getattr(first, "gradient_checkpointing", False)
        for index, layer in enumerate(backbone.layers):
            arguments = (index, layer, x, cos, sin, context)
            x = (
                checkpoint(self._layer, *arguments, use_reentrant=False, preserve_rng_state=False)
                if keeps_little
                else self._layer(*arguments)
            )
        return _Norm.apply(x, backbone.norm.weight, backbone.norm.variance_epsilon, self._kernels)  # type: ignore[no-untyped-call, no-any-return]

    def _layer(self, index: int, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
        q_THD, k_TKD, v_TKD = _BeforeAttention.apply(  # type: ignore[no-untyped-call]
            self._kernels,
            (norm.variance_epsilon, self._packed.head_dim),
            x,
            cos,
            sin,
            norm.weight,
            *_weights(attention.q_proj, attention.k_proj, attention.v_proj),
        )
        mixed = context.attend(index, q_THD, k_TKD, v_TKD, *self._calls[index]).flatten(1)
        norm = layer.post_attention_layernorm
        return _AfterAttention.apply(  # type: ignore[no-untyped-call, no-any-return]
            self._kernels,
            norm.variance_epsilon,
            x,
            mixed,
            norm.weight,
            *_weights(attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        )


class AttentionRecorder:
    """An `AttentionContext` that passes calls on to another one and records them.

    Attributes:
        calls: scale and window of each layer.
        layers: the layer of each call; some architectures make several calls per layer.
        inputs: query, key and value of each call, one after the other.
    """

    def __init__(self, context: AttentionContext) -> None:
        self.context = context
        self.calls: dict[int, tuple[float, int | None]] = {}
        self.layers: list[int] = []
        self.inputs: list[Tensor] = []

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        self.calls[layer] = (scale, window)
        self.layers.append(layer)
        self.inputs += [q_THD, k_TKD, v_TKD]
        return self.context.attend(layer, q_THD, k_TKD, v_TKD, scale, window)


def _layer_calls(
    packed: PackedModel, tokens: Tensor, positions: Tensor, context: AttentionContext
) -> list[tuple[int, Tensor, dict[str, Any]]]:
    """How the model calls its layers: index, input `[T, d]`, keyword arguments."""
    calls: list[tuple[int, Tensor, dict[str, Any]]] = []
    layers: Any = packed.backbone.layers
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            note = layer.register_forward_pre_hook(
                lambda _, args, options, i=index: calls.append((i, args[0][0], options)), with_kwargs=True
            )
            hooks.enter_context(note)
        packed.packed_hidden(tokens, positions, context)
    return calls


def is_close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Equal up to a relative tolerance; None: the rounding of the dtype, accumulated over layers."""
    if tolerance is None:
        tolerance = {torch.float64: 1e-8, torch.float32: 1e-3}.get(b.dtype, 0.1)
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, compiled: Kernels) -> Tensor:
        out = torch.empty_like(x)
        compiled.rms_norm(x, None, weight, out, *x.shape, eps)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kernels = eps, compiled
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, _, to_weight = _norm_backward(ctx.kernels, x, weight, ctx.eps, grads[0].contiguous(), torch.zeros_like(x))
        return to_x, give(weight, to_weight), None, None


class _BeforeAttention(torch.autograd.Function):
    """Norm, projections and rotation: `x` `[T, d]` to query `[T, H, D]`, key and value `[T, K, D]`."""

    @staticmethod
    def forward(
        ctx: Any,
        compiled: Kernels,
        sizes: tuple[float, int],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Tensor,
        *projections: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        eps, head_dim = sizes
        normed = torch.empty_like(x)
        compiled.rms_norm(x, None, norm, normed, *x.shape, eps)
        q_THD, k_TKD, v_TKD = (
            linear(normed, weight, bias).unflatten(1, (-1, head_dim))  # type: ignore[arg-type]
            for weight, bias in zip(projections[::2], projections[1::2], strict=True)
        )
        compiled.rotate(q_THD, cos, sin, *q_THD.shape, cos.shape[1])
        compiled.rotate(k_TKD, cos, sin, *k_TKD.shape, cos.shape[1])
        ctx.save_for_backward(x, cos, sin, norm, *projections)
        ctx.kernels, ctx.eps = compiled, eps
        return q_THD, k_TKD, v_TKD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, norm, *projections = ctx.saved_tensors
        # The transpose of a rotation is the rotation back.
        dq_THD, dk_TKD = (grad.clone(memory_format=torch.contiguous_format) for grad in grads[:2])
        ctx.kernels.rotate(dq_THD, cos, -sin, *dq_THD.shape, cos.shape[1])
        ctx.kernels.rotate(dk_TKD, cos, -sin, *dk_TKD.shape, cos.shape[1])
        flat = [grad.flatten(1) for grad in (dq_THD, dk_TKD, grads[2])]
        to_normed = flat[0] @ projections[0]
        for grad, weight in zip(flat[1:], projections[2::2], strict=True):
            to_normed.addmm_(grad, weight)
        to_x, normed, to_norm = _norm_backward(ctx.kernels, x, norm, ctx.eps, to_normed, torch.zeros_like(x))
        to_weights = _weight_gradients(projections, flat, [normed] * 3, ctx.needs_input_grad[6:])
        return None, None, to_x, None, None, give(norm, to_norm), *to_weights


class _AfterAttention(torch.autograd.Function):
    """Output projection and feed-forward part with their residuals: the layer's input `x` `[T, d]` and its attention
    `[T, H * D]` to its output `[T, d]`."""

    @staticmethod
    def forward(
        ctx: Any,
        compiled: Kernels,
        eps: float,
        x: Tensor,
        mixed: Tensor,
        norm: Tensor,
        *projections: Tensor | None,
    ) -> Tensor:
        o, gate_of, up_of, down = zip(projections[::2], projections[1::2], strict=True)
        middle, normed = x.clone(), torch.empty_like(x)
        compiled.rms_norm(middle, linear(mixed, *o), norm, normed, *x.shape, eps)  # type: ignore[arg-type]
        gate, up = linear(normed, *gate_of), linear(normed, *up_of)  # type: ignore[arg-type]
        product = torch.empty_like(gate)
        compiled.silu_mul(gate, up, product, gate.numel())
        ctx.save_for_backward(mixed, middle, gate, up, norm, *projections)
        ctx.kernels, ctx.eps = compiled, eps
        return linear(product, *down).add_(middle)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, middle, gate, up, norm, *projections = ctx.saved_tensors
        out = grads[0].contiguous()
        o, gate_of, up_of, down = projections[::2]
        product = out @ down  # its gradient, until silu_mul_backward puts the product itself in this place
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        ctx.kernels.silu_mul_backward(gate, up, product, to_gate, to_up, gate.numel())
        to_normed = (to_gate @ gate_of).addmm_(to_up, up_of)
        to_middle, normed, to_norm = _norm_backward(ctx.kernels, middle, norm, ctx.eps, to_normed, out.clone())
        to_weights = _weight_gradients(
            projections, [to_middle, to_gate, to_up, out], [mixed, normed, normed, product], ctx.needs_input_grad[5:]
        )
        return None, None, to_middle, to_middle @ o, give(norm, to_norm), *to_weights


def _norm_backward(
    compiled: Kernels, x: Tensor, weight: Tensor, eps: float, grad: Tensor, to_x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`to_x` with the gradient of the norm's input added, the norm's output, and the gradient of its weight."""
    normed, to_weight = torch.empty_like(x), torch.zeros(weight.shape, dtype=torch.float32)
    compiled.rms_norm_backward(x, weight, grad, to_x, normed, to_weight, *x.shape, eps)
    return to_x, normed, to_weight.to(weight.dtype)


def _weight_gradients(
    projections: list[Tensor | None], grads: list[Tensor], inputs: list[Tensor], needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of each projection's weight and bias, given its output's gradient and its input."""
    gradients: list[Tensor | None] = []
    for index, (grad, x) in enumerate(zip(grads, inputs, strict=True)):
        weight, bias = projections[2 * index : 2 * index + 2]
        gradients.append(give(weight, grad.t() @ x) if needed[2 * index] else None)
        gradients.append(give(bias, grad.sum(0)) if needed[2 * index + 1] else None)
    return gradients


def _weights(*modules: nn.Linear) -> list[Tensor | None]:
    return [part for module in modules for part in (module.weight, module.bias)]


def has_llama_shape(backbone: Any, head_dim: int) -> bool:
    """Pre-norm layers of plain linear maps with SiLU gates and RMS norms, sizes as the kernels need them."""
    if not all(hasattr(backbone, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return False
    if type(backbone.embed_tokens) is not nn.Embedding or not hasattr(backbone.norm, "variance_epsilon"):
        return False
    sizes = [backbone.embed_tokens.weight.shape[1], head_dim // 2]
    for layer in backbone.layers:
        # Adapters, quantised and sharded layers are other classes.
        linears = [getattr(getattr(layer, part, None), name, None) for part, name in _LINEARS]
        norms = [getattr(layer, name, None) for name in _NORMS]
        is_plain = all(type(module) is nn.Linear for module in linears)
        if not is_plain or not all(hasattr(norm, "variance_epsilon") for norm in norms):
            return False
        if any(name not in _PARAMETERS for name, _ in layer.named_parameters()):
            return False
        if type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            return False
        sizes.append(layer.mlp.gate_proj.out_features)
    # Not those of the embedding: gradient checkpointing hooks it only to make its output require a gradient.
    plain = [backbone, backbone.norm, *backbone.layers.modules()]
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in plain)
    return not hooked and all(size % VECTOR == 0 for size in sizes)
