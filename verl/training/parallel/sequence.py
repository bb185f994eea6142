"""Sequence parallelism (Ulysses; Jacobs et al. 2023, arXiv 2309.14509): a micro-batch's flat tokens cut over ranks.

Ranks along `sp` hold the same weights and get the same rows. Each runs a slice of the flat tokens through backbone and
head, so it keeps a slice of the activations. Around attention, an all-to-all trades slices of tokens with all heads for
all tokens with a part of the heads, and another one goes back; windows and shared prompts work as in one process.
Predictions are gathered, so the loss is the same on all these ranks. Each computes the gradients of its slice; they are
summed over `sp` after the last backward pass of a step.

Shapes: T flat tokens, C tokens of a slice, P sp ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from verl._base.autograd import exchange, joined
from verl.attention.segments import Packed
from verl.models.packed import AttentionContext


def sliced(flat: Packed, group: Any, per_row: bool) -> Packed:
    """This rank's slice of the flat tokens of a micro-batch, all known to all ranks of `group`.

    Slices are padded to one size, with at least one token at the micro-batch's last position, so that rotary
    embeddings that depend on the sequence length do not change. No prediction is read from a padding token.

    Args:
        per_row: predictions are read at the last token of a row (`Packed.last`); else at `Packed.predict`.
    """
    ranks, index = dist.get_world_size(group), dist.get_rank(group)
    size = -(-len(flat.tokens) // ranks)
    here = slice(index * size, (index + 1) * size)
    tokens, positions = flat.tokens[here], flat.positions[here]
    spare = size + 1 - len(tokens)
    read = flat.last if per_row else flat.predict
    owner = read // size
    counted = (owner[:, None] == torch.arange(ranks, device=owner.device)).cumsum(0)
    most = int(counted.amax()) if len(read) else 1
    position = owner * most + counted.gather(1, owner[:, None])[:, 0] - 1
    mine = (owner == index).nonzero()[:, 0]

    def whole(values: Tensor) -> Tensor:
        padded = pad(values, (0, most - len(values)))
        return flat.gather(joined(padded, [most] * ranks, group).index_select(0, position))

    return replace(
        flat,
        tokens=torch.cat([tokens, flat.tokens[:1].expand(spare)]),
        positions=torch.cat([positions, flat.positions.max().expand(spare)]),
        context=_HeadExchange(  # type: ignore[arg-type]  # for models with a packed forward: `attend` is all they call
            flat.context, len(flat.tokens), size, group, ranks
        ),
        predict=flat.predict if per_row else read[mine] - here.start,
        targets=flat.targets if per_row else flat.targets[mine],
        last=read[mine] - here.start if per_row else flat.last,
        gather=whole,
    )


class _HeadExchange:
    """The attention context of a slice: `context`, of all T tokens, on this rank's part of the heads."""

    def __init__(self, context: AttentionContext, tokens: int, size: int, group: Any, ranks: int) -> None:
        self._context, self._tokens, self._size = context, tokens, size
        self._ranks = ranks
        #: Sends `x[i]` to rank i; the result has one part from each rank, in the same shape.
        self._exchange = partial(exchange, group=group, sent=[1] * ranks, received=[1] * ranks)

    def attend(
        self, layer: int, q_CHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The attention output `[C, H, D]`, zeros for padding tokens."""
        spare = len(q_CHD) - self._size
        # Key/value heads that do not divide evenly are repeated until they do; each stays with its query heads.
        repeat = math.lcm(k_CKD.shape[1], self._ranks) // k_CKD.shape[1]
        heads = q_CHD, k_CKD.repeat_interleave(repeat, 1), v_CKD.repeat_interleave(repeat, 1)
        # One call for all three. Under autocast, rotary embeddings leave query and key in fp32.
        parts = [x_CHD[: self._size].to(v_CKD.dtype).unflatten(1, (self._ranks, -1)) for x_CHD in heads]
        # From here on H and K are this rank's part of the heads, and T all tokens.
        all_THD = self._exchange(torch.cat(parts, 2).transpose(0, 1)).flatten(0, 1)[: self._tokens]
        q_THD, k_TKD, v_TKD = all_THD.split([part.shape[2] for part in parts], 1)
        out_THD = self._context.attend(layer, q_THD, k_TKD, v_TKD, scale, window)
        out_THD = pad(out_THD, (0, 0, 0, 0, 0, self._ranks * self._size - self._tokens))
        out_CHD = self._exchange(out_THD.unflatten(0, (self._ranks, -1))).transpose(0, 1).flatten(1, 2)
        return pad(out_CHD, (0, 0, 0, 0, 0, spare))
