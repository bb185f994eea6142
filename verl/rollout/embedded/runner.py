"""The forward passes of the embedded engine: on one rank, or on the ranks that share a model by tensor parallelism.

Those ranks compute one forward together, each with its heads and its part of the KV cache. One of them, the first, has
the requests: it decides what is computed (`ScheduledBatch`), samples, and sends the others what they need to follow it.
So order, admission, preemption, aborts, episodes and guards are decided once, and nothing has to be equal by luck.

Shapes: T tokens of a step, N rows that are sampled for, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.device import to_device
from verl.kernels.compiled import kernels
from verl.models.log_probs import linear_into
from verl.models.packed import PackedModel
from verl.rollout.embedded.attention import PagedAttention, ScheduledBatch
from verl.rollout.embedded.kv_cache import KVCache

# Matrix products compute blocks of about four rows, and the remaining rows in another order of summation. Padding the
# rows of a step to a multiple of 8 makes a token's result independent of how many others there are. The step grows with
# the number of rows, because a library keeps code for every shape that it has met (oneDNN: half a megabyte).
_ROWS, _SIZES = 8, 16
#: With `batch_invariant` every product has this many rows.
FIXED_ROWS = 64
# What the first rank orders: nothing more, the hidden states of a plan, the logits of some states.
_END, _HIDDEN, _LOGITS = range(3)


class Runner:
    """Runs a model over the KV cache.

    Args:
        batch_invariant: all products have `FIXED_ROWS` rows.
        max_batch: rows that are sampled for at a time.
        compiled: on CPU use the compiled kernels where they can be built.

    Attributes:
        leads: whether this rank decides.
    """

    def __init__(
        self,
        packed: PackedModel,
        cache: KVCache,
        *,
        batch_invariant: bool = False,
        max_batch: int = 1,
        compiled: bool = True,
    ) -> None:
        self.packed, self.cache, self.group = packed, cache, packed.tensor_group
        self._rows = FIXED_ROWS if batch_invariant else None
        self._first = 0 if self.group is None else dist.get_process_group_ranks(self.group)[0]
        self.leads = self.group is None or dist.get_rank() == self._first
        has_kernels = compiled and self.group is None and kernels(packed.dtype, packed.device) is not None
        self._plain_head = has_kernels and _head_is_plain(packed)
        self._most_rows = max_batch
        self._logit_space = torch.empty(0, dtype=packed.dtype)
        self._last: Tensor | None = None
        self.look_at_model()

    def look_at_model(self) -> None:
        """Its modules may have changed."""
        self._forward = self.packed.inference()

    @torch.no_grad()
    def hidden(self, plan: ScheduledBatch, copies: Sequence[tuple[int, int]], last: Tensor | None = None) -> Tensor:
        """Final hidden states `[T, d]` of the planned tokens, after blocks of the cache were copied (from, to). A token
        of -1 - i is `last[i]`."""
        self._last = last
        if self.group is not None and (plan.tokens or copies):
            self._order(_HIDDEN, [*plan.numbers(), len(copies), *(block for pair in copies for block in pair)])
        return self._hidden(plan, copies)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Logits `[N, V]` of states `[N, d]`; in the model's dtype, without an fp32 copy, where the head is plain and
        kernels sample."""
        if self.group is not None:
            self._order(_LOGITS, [len(states)])
            dist.broadcast(states, self._first, group=self.group)
        return self._logits(states)

    def filled(self, rows: int) -> int:
        """The number of rows, with padding, for a product of `rows` rows."""
        if self._rows is not None:
            return self._rows
        step = max(_ROWS, (1 << (rows - 1).bit_length()) // _SIZES)
        return -(-rows // step) * step

    def end(self) -> None:
        """Free what is kept between steps, and let the ranks that follow go on with something else."""
        self._logit_space = torch.empty(0, dtype=self.packed.dtype)
        if self.group is not None and self.leads:
            self._order(_END, [])

    @torch.no_grad()
    def follow(self) -> None:
        """Compute what the first rank orders, until it ends."""
        while True:
            head = torch.empty(2, dtype=torch.int64)
            dist.broadcast(head, self._first, group=self.group)
            order, count = head.tolist()
            if order == _END:
                return
            body = torch.empty(count, dtype=torch.int64)
            dist.broadcast(body, self._first, group=self.group)
            numbers = body.tolist()
            if order == _HIDDEN:
                plan, rest = ScheduledBatch.of_numbers(numbers, self.cache.block)
                self._hidden(plan, [*zip(rest[1::2], rest[2::2], strict=True)])
            else:
                states = torch.empty(
                    numbers[0], self.packed.hidden_size, dtype=self.packed.dtype, device=self.packed.device
                )
                dist.broadcast(states, self._first, group=self.group)
                self._logits(states)

    def _order(self, order: int, numbers: Sequence[int]) -> None:
        dist.broadcast(torch.tensor([order, len(numbers)]), self._first, group=self.group)
        if numbers:
            dist.broadcast(torch.tensor(numbers), self._first, group=self.group)

    def _hidden(self, plan: ScheduledBatch, copies: Sequence[tuple[int, int]]) -> Tensor:
        packed = self.packed
        self.cache.copy(copies)
        if not plan.tokens:
            return torch.empty(0, packed.hidden_size, dtype=packed.dtype, device=packed.device)
        training = packed.model.training
        if training:
            packed.model.eval()
        try:
            states = [self._part(part) for part in (plan.split(self._rows) if self._rows else [plan])]
        finally:
            if training:
                packed.model.train()
        return states[0] if len(states) == 1 else torch.cat(states)

    def _part(self, plan: ScheduledBatch) -> Tensor:
        tokens, device = len(plan.tokens), self.packed.device
        filling = [0] * (self.filled(tokens) - tokens)
        forward = self._forward if self.packed.ready is None else self.packed.hidden
        given = to_device(torch.tensor(plan.tokens + filling), device)
        if self._last is not None:
            given = torch.where(given < 0, self._last.index_select(0, (-1 - given).clamp(min=0)), given)
        hidden = forward(
            given,
            to_device(torch.tensor(plan.positions + filling), device),
            PagedAttention(self.cache, plan, self._rows),
        )
        return hidden[:tokens]

    def _logits(self, states: Tensor) -> Tensor:
        if not self._plain_head:
            return self.packed.logits(states)
        weight, bias = self.packed.head()
        if len(self._logit_space) < len(states):
            self._logit_space = states.new_empty(self.filled(self._most_rows), len(weight))
        return linear_into(states, weight, bias, self._logit_space[: len(states)])


@torch.no_grad()
def _head_is_plain(packed: PackedModel) -> bool:
    """Whether logits are the head's linear map and nothing else (no scale, no soft cap)."""
    states = torch.linspace(-3, 3, 2 * packed.hidden_size, dtype=packed.dtype).view(2, -1)
    plain = torch.nn.functional.linear(states, *packed.head())
    return torch.equal(packed.logits(states), plain.to(torch.promote_types(plain.dtype, torch.float32)))
