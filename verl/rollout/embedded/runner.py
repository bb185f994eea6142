"""The model's side of a step: `ModelRunner.run` computes a `ScheduledBatch` and draws the next tokens.

It returns `PendingTokens`: drawn, and in flight until the engine reads them (`PendingTokens.take`, `Response.append`).
It reads them at once; or, where it looks ahead, after it has launched the next step, which finds them in `last_draw` on
the device. Blocks of the cache are the scheduler's affair: the batch says which.

By tensor parallelism ranks compute one forward together, each with its heads and its part of the KV cache. One of them,
the first, has the requests: it decides what is computed, samples, and sends the others what they need to follow it. So
order, admission, preemption, aborts, episodes and guards are decided once, and nothing has to be equal by luck. If it
fails in a forward, it raises at once and orders nothing more: the others wait in that forward until the job ends them.

Shapes: T tokens of a step, N rows that are sampled for, d hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl._host.device import to_device
from verl.errors import RolloutError
from verl.kernels.compiled import kernels
from verl.models.packed import PackedModel, evaluating
from verl.rollout.embedded.attention import BatchTensors, PagedAttention, copy_blocks
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.embedded.response import PendingTokens, draw
from verl.rollout.embedded.scheduler import EngineStats, ResponseState, ScheduledBatch

if TYPE_CHECKING:
    from verl.rollout.embedded.decode import Decoder

# Matrix products compute blocks of about four rows, and the remaining rows in another order of summation. Padding the
# rows of a step to a multiple of 8 makes a token's result independent of how many others there are. The step grows with
# the number of rows, because a library keeps code for every shape that it has met (oneDNN: half a megabyte).
_ROWS, _SIZES = 8, 16
#: With `batch_invariant` every product has this many rows.
FIXED_ROWS = 64
# What the first rank orders: nothing more, the hidden states of a batch, the logits of some states.
_END, _HIDDEN, _LOGITS = range(3)


class ModelRunner:
    """Runs a model over the KV cache.

    Args:
        max_batch: rows that are sampled for at a time.
        max_length: of prompt and response together.
        batch_invariant: all products have `FIXED_ROWS` rows.
        compiled: on CPU use the compiled kernels where they can be built.
        look_ahead: a step is run before the tokens of the one before are read; not with tensor parallelism.

    Attributes:
        leads: whether this rank decides.
        last_draw: `[max_batch]` or more, int64: the tokens of the last draw by row; None without looking ahead.
        decoder: runs decode steps in fixed buffers, which a CUDA graph needs; where it looks ahead without our kernels.
    """

    def __init__(
        self,
        packed: PackedModel,
        cache: KVCache,
        *,
        max_batch: int,
        max_length: int,
        batch_invariant: bool = False,
        compiled: bool = True,
        look_ahead: bool = False,
    ) -> None:
        self.packed, self.cache, self.group = packed, cache, packed.tensor_group
        self._rows = FIXED_ROWS if batch_invariant else None
        self._first = 0 if self.group is None else dist.get_process_group_ranks(self.group)[0]
        self.leads = self.group is None or dist.get_rank() == self._first
        #: Whether the others compute what this rank has ordered: they take no other order then.
        self._is_computing = False
        self._max_batch = max_batch
        self.last_draw: Tensor | None = None
        self.decoder: Decoder | None = None
        if look_ahead:
            self.last_draw = torch.zeros(max(max_batch, self.filled(max_batch)), dtype=torch.int64, device=cache.device)
            if cache.kernels is None and not batch_invariant:
                from verl.rollout.embedded.decode import Decoder

                self.decoder = Decoder(packed, cache, self.last_draw, max_length=max_length)
        has_kernels = compiled and self.group is None and kernels(packed.dtype, cache.device) is not None
        self._plain_head = has_kernels and _head_is_plain(packed)
        precise = torch.promote_types(packed.dtype, torch.float32)
        self._kernels = kernels(packed.dtype if self._plain_head else precise, cache.device) if compiled else None
        self._logit_space = torch.empty(0, dtype=packed.dtype)
        self._no_states = torch.empty(0, packed.hidden_size, dtype=packed.dtype, device=cache.device)
        self.look_at_model()

    def look_at_model(self) -> None:
        """Choose the forward and find the head again: the model's modules may have changed."""
        self._model_forward = self.packed.choose_forward()
        self._head: Any = self.packed.output_layer()

    @torch.no_grad()
    def run(self, batch: ScheduledBatch, policy_version: int, stats: EngineStats) -> list[PendingTokens]:
        """Compute the tokens of the batch, and draw one for each of its `samples`.

        In a decode step (`ScheduledBatch.is_decode`) these are the last token of each response. Its keys and values go
        to its slot; the logits of its hidden state are what the next token is drawn from.
        """
        started, model = time.perf_counter(), self.packed.model
        together: AbstractContextManager[None] = nullcontext()
        if self.group is not None and (batch.tokens or batch.copies):
            text = torch.frombuffer(bytearray(batch.to_json()), dtype=torch.uint8)
            together = self._together(_HIDDEN, len(text), text)
        stats.steps += bool(batch.tokens)
        with together, evaluating(model) if model.training else nullcontext():
            if batch.copies:
                copy_blocks(self.cache, batch.copies)
            # The same forward and draw in fixed buffers; it fills `last_draw` itself.
            if self.decoder is not None and batch.is_decode and self.packed.ready is None:
                drawn = [self.decoder.step(batch, self.filled(len(batch.samples)), policy_version)]
                stats.forward_seconds += time.perf_counter() - started
                return drawn
            hidden = self._forward(batch)
        for prompt, index in batch.completed:
            prompt.hidden = hidden[index].clone()
        computed = time.perf_counter()
        stats.forward_seconds += computed - started
        drawn = self._draw(batch.samples, hidden, policy_version) if batch.samples else []
        stats.sampling_seconds += time.perf_counter() - computed
        return drawn

    def filled(self, rows: int) -> int:
        """The number of rows, with padding, for a product of `rows` rows."""
        if self._rows is not None:
            return self._rows
        step = max(_ROWS, (1 << (rows - 1).bit_length()) // _SIZES)
        return -(-rows // step) * step

    def end(self) -> None:
        """Free what is kept between steps, and let the ranks that follow go on with something else."""
        self._logit_space = torch.empty(0, dtype=self.packed.dtype)
        self.forget_steps()
        if self.group is not None and self.leads and not self._is_computing:
            self._order(_END, 0)
        self._is_computing = False

    def forget_steps(self) -> None:
        """Drop recorded decode steps: weights or KV cache have moved in memory."""
        if self.decoder is not None:
            self.decoder.forget()

    @torch.no_grad()
    def follow(self) -> None:
        """Compute what the first rank orders, until it ends."""
        while True:
            head = torch.empty(2, dtype=torch.int64)
            dist.broadcast(head, self._first, group=self.group)
            order, count = head.tolist()
            if order == _END:
                return
            if order == _LOGITS:
                states = self._no_states.new_empty(count, self._no_states.shape[1])
                dist.broadcast(states, self._first, group=self.group)
                self.packed.logits(states)
                continue
            text = torch.empty(count, dtype=torch.uint8)
            dist.broadcast(text, self._first, group=self.group)
            batch = ScheduledBatch.from_json(bytes(text.tolist()), self.cache.block)
            if batch.copies:
                copy_blocks(self.cache, batch.copies)
            with evaluating(self.packed.model):
                self._forward(batch)

    @contextmanager
    def _together(self, order: int, count: int, content: Tensor) -> Iterator[None]:
        """Inside, all ranks compute what is ordered. Where that fails, they take no order until the engine sleeps."""
        if self._is_computing:
            raise RolloutError("the ranks that generate together are no longer in step: a forward of theirs failed")
        self._is_computing = True
        self._order(order, count)
        dist.broadcast(content, self._first, group=self.group)
        yield
        self._is_computing = False

    def _order(self, order: int, count: int) -> None:
        dist.broadcast(torch.tensor([order, count]), self._first, group=self.group)

    def _forward(self, batch: ScheduledBatch) -> Tensor:
        """Final hidden states `[T, d]` of the batch's tokens."""
        if not batch.tokens:
            return self._no_states
        # While weights are on their way, layers wait for them in the model's own code alone.
        forward = self._model_forward if self.packed.ready is None else self.packed.hidden
        states = []
        for part in [batch] if self._rows is None else batch.split(self._rows):
            count = len(part.tokens)
            tensors = BatchTensors.of(part, self.cache.device, self.filled(count))
            tokens = tensors.tokens if self.last_draw is None else tensors.known_tokens(self.last_draw)
            hidden = forward(tokens, tensors.positions, PagedAttention(self.cache, tensors, self._rows))
            states.append(hidden[:count])
        return states[0] if len(states) == 1 else torch.cat(states)

    def _draw(
        self, samples: list[tuple[ResponseState, int]], hidden: Tensor, policy_version: int
    ) -> list[PendingTokens]:
        """Draw a token for each of `samples`, given the states `[T, d]` of the step."""
        first = [s.prompt.hidden for s, index in samples if index < 0 and s.prompt and s.prompt.hidden is not None]
        # The states of prompts, for responses without a token, are behind those of this step's tokens.
        states = torch.cat([hidden, torch.stack(first)]) if first else hidden
        fresh = iter(range(len(hidden), len(states)))
        rows = [next(fresh) if index < 0 else index for _, index in samples]
        size = self._rows or len(rows)
        drawn = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            # Padded by copies of a row that is there, so that no row's numbers depend on how many there are; what is
            # drawn for a copy has no response, and is dropped.
            some += some[:1] * (self.filled(len(some)) - len(some))
            logits = self.logits(states.index_select(0, to_device(torch.tensor(some), states.device)))
            responses = [state.response for state, _ in samples[start : start + size]]
            drawn.append(draw(responses, logits, policy_version, self._kernels))
        if self.last_draw is not None:  # where the next step, scheduled before these are read, finds them
            tokens = torch.cat([pending.tokens[: len(pending.responses)] for pending in drawn])
            self.last_draw[: len(tokens)].copy_(tokens)
        return drawn

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[N, V]` of states `[N, d]`; in the model's dtype, without an fp32 copy, where the head is plain and
        kernels sample."""
        if self.group is not None:
            with self._together(_LOGITS, len(states), states):
                return self.packed.logits(states)
        if not self._plain_head:
            return self.packed.logits(states)
        weight, bias = self._head.weight, self._head.bias
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            # torch would take MKL, which copies the whole head into blocks for the few rows of a decode step; oneDNN,
            # as in bf16, reads it where it lies: at 32 rows in half of the time.
            logits: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
            return logits
        if len(self._logit_space) < len(states):
            self._logit_space = states.new_empty(self.filled(self._max_batch), len(weight))
        out = self._logit_space[: len(states)]
        return torch.mm(states, weight.t(), out=out) if bias is None else torch.addmm(bias, states, weight.t(), out=out)


@torch.no_grad()
def _head_is_plain(packed: PackedModel) -> bool:
    """Whether logits are the head's linear map and nothing else (no scale, no soft cap)."""
    states = torch.linspace(-3, 3, 2 * packed.hidden_size, dtype=packed.dtype).view(2, -1)
    plain = torch.nn.functional.linear(states, *packed.head())
    return torch.equal(packed.logits(states), plain.to(torch.promote_types(plain.dtype, torch.float32)))
