"""Frozen weights in 4 bits, for models that are only read and for the base of a LoRA (QLoRA; Dettmers et al. 2023,
arXiv 2305.14314).

Each row of a weight is quantised in groups of 64 numbers (32 where 64 does not divide its length). A group has a step
and a lowest value in the model's dtype, and each number is stored as how many steps, 0 to 15, it lies above the lowest:
4.5 bits per number in half precision. Each matmul dequantises its weight for a moment, forward and backward.

Legend: O output features, G groups of a row, S numbers of a group.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl.errors import ModelError

logger = logging.getLogger(__name__)

#: Numbers of a group, by preference.
_GROUPS = (64, 32)


class Int4Linear(nn.Linear):
    """A linear layer with a frozen weight in 4 bits. `weight` dequantises it, to a new tensor each time.

    Attributes:
        codes: uint8 `[out, in / 2]`: numbers 2 i and 2 i + 1 of a row in the low and the high half of byte i.
        step, lowest: both `[out, in / group]`.
    """

    codes: Tensor
    step: Tensor
    lowest: Tensor

    def __init__(self, out_features: int, in_features: int, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = out_features, in_features
        device = None if bias is None else bias.device
        groups = in_features // group_of(in_features)
        self.register_buffer("codes", torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device))
        for name in ("step", "lowest"):
            self.register_buffer(name, torch.empty(out_features, groups, dtype=dtype, device=device))
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, layer: nn.Linear) -> Int4Linear:
        """The layer, rounded to nearest."""
        rounded = cls(layer.out_features, layer.in_features, layer.bias, layer.weight.dtype).to(layer.weight.device)
        w_OGS = layer.weight.detach().float().unflatten(1, (rounded.step.shape[1], -1))
        rounded.lowest.copy_(w_OGS.amin(-1))
        rounded.step.copy_((w_OGS.amax(-1) - w_OGS.amin(-1)) / 15)
        # By step and lowest as they were rounded to the model's dtype. A group of equal numbers has step 0.
        steps_OGS = (w_OGS - rounded.lowest.float()[..., None]) / rounded.step.float().clamp(min=1e-30)[..., None]
        codes = steps_OGS.round().clamp(0, 15).to(torch.uint8).flatten(1)
        rounded.codes.copy_(codes[:, ::2] | (codes[:, 1::2] << 4))
        return rounded.requires_grad_(False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """`[out, in]`, in the dtype of `step`."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        codes_OGS = codes.view(self.out_features, self.step.shape[1], -1)
        return torch.addcmul(self.lowest[..., None], codes_OGS.to(self.step.dtype), self.step[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return _Int4Matmul.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def dense(self) -> nn.Linear:
        """A plain layer with the dequantised weight."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.weight, requires_grad=False)
        plain.register_parameter("bias", self.bias)
        return plain


class _Int4Matmul(torch.autograd.Function):
    """Dequantises its weight again in the backward pass: to keep all layers' weights would take too much memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Int4Linear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.weight.to(x.dtype), layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight.to(grads[0].dtype), None


def group_of(in_features: int) -> int:
    """The size of the groups of a row of this length; 0: it cannot be quantised."""
    return next((size for size in _GROUPS if in_features % size == 0), 0)


@torch.no_grad()
def to_int4(model: Any) -> Tensor:
    """Quantise the linear layers of a model, all but its head, and freeze its weights. |Differences| of its log-probs
    (or scores) on a probe are returned, and logged with the bytes of its weights before and after.

    Raises:
        ModelError: it has no linear layer that can be quantised.
    """
    from verl.models.outputs import LENGTH, outputs  # which loads transformers

    expected, before = outputs(model), weight_bytes(model)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not output}
    layers = {n: layer for n, layer in linear.items() if layer.out_features > 1 and group_of(layer.in_features)}
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layers that int4 could keep: load it in another dtype")
    for name, layer in layers.items():
        model.set_submodule(name, Int4Linear.of(layer))
    model.requires_grad_(False)
    gap = (outputs(model) - expected).abs()
    logger.info(
        "%s in int4: on a probe of %d tokens %s differ from those in full precision by %.3g on average, %.3g at most; "
        "its weights take %.1f MB, before %.1f",
        *(type(model).__name__, 2 * LENGTH, "scores" if output is None else "log-probs"),
        *(float(gap.mean()), float(gap.max()), weight_bytes(model) / 1e6, before / 1e6),
    )
    return gap


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights and buffers, tied ones once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
