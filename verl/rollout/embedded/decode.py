"""Decode steps in memory that stays where it is: one token of each running response, padded to one of a few sizes.

A step's numbers (tokens, positions, block tables, how each row is sampled) go to the device as one copy. A token in
flight is taken from the step before, on the device. Where the kernels allow it, the forward and the
sampling of each size are recorded once as a CUDA graph and replayed.

Legend: S rows with padding, B blocks of the longest sequence that there can be.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from verl._host import device
from verl.attention import flash
from verl.models.packed import PackedModel
from verl.rollout.embedded.attention import BatchTensors, PagedAttention
from verl.rollout.embedded.kv_cache import KVCache, blocks_for
from verl.rollout.embedded.response import PendingTokens, sample_next, sampling_inputs
from verl.rollout.embedded.sampler import SamplingFlags, SamplingTable, numbers_of, sample
from verl.rollout.embedded.scheduler import ScheduledBatch

# Rows of `_Step.numbers`, before those of the block table; the last five are fp64.
_TOKEN, _POSITION, _IN_FLIGHT, _SLOT, _USED, _UNIFORM, _TABLE = 0, 1, 2, 3, 4, 5, 10


class Decoder:
    """Runs decode steps.

    Args:
        last_sampled: `[max_batch]` int64, the tokens of the step before; each step overwrites them.
        max_length: of prompt and response together.
    """

    def __init__(self, packed: PackedModel, cache: KVCache, last_sampled: torch.Tensor, *, max_length: int) -> None:
        self.packed, self.cache, self.last_sampled = packed, cache, last_sampled
        self.width = blocks_for(max_length, cache.block)
        self.forget()

    def forget(self) -> None:
        """Drop recorded steps: weights or KV cache have moved in memory."""
        self._steps: dict[tuple[int, SamplingFlags | None], _Step] = {}

    def step(self, batch: ScheduledBatch, rows: int, policy_version: int) -> PendingTokens:
        """Sample the next token of each response, given its last one; `rows`: the padded batch size."""
        responses = [response for response, _ in batch.samples]
        # Edits are the caller's code, so what they change is sampled outside of the recorded step; so is what keeps its
        # logits.
        outside = any(r.is_edited or r.request.top_log_probs for r in responses)
        params, uniforms = sampling_inputs(responses, rows)
        flags = None if outside else SamplingFlags.of(params)
        step = self._steps.get((rows, flags))
        if step is None:
            step = self._steps[rows, flags] = _Step(self, rows, flags)
        step.run(batch, uniforms, numbers_of(params))
        if flags is None:
            pending = sample_next(responses, step.logits, policy_version)
        else:
            pending = PendingTokens(responses, step.tokens, step.log_probs, policy_version, step.logits.dtype)
        self.last_sampled[:rows].copy_(pending.tokens)
        return pending


class _Step:
    """A decode step of one size and one way of sampling; `flags` None: it ends with the logits.

    Attributes:
        numbers: `[10 + B, S]` int64, all that the step reads but weights, cache and the step before.
        logits: `[S, V]`, fp32 or fp64; overwritten where the step samples.
        tokens, log_probs: `[S]` int64 and fp64.
    """

    def __init__(self, owner: Decoder, rows: int, flags: SamplingFlags | None) -> None:
        self._owner, self._flags, self._cache = owner, flags, owner.cache
        self.numbers = torch.zeros(_TABLE + owner.width, rows, dtype=torch.int64, device=owner.last_sampled.device)
        self._begins = torch.arange(rows + 1, dtype=torch.int32, device=owner.last_sampled.device)
        self._recorded: Callable[[], None] | None = None
        self._is_new = True

    def run(self, batch: ScheduledBatch, uniforms: np.ndarray, sampling: list[list[float]]) -> None:
        """Copy the step's numbers to the device, and compute it."""
        # Padding is a first token whose key and value go to the spare block.
        rows, count = self.numbers.shape[1], len(batch.tokens)
        numbers = np.zeros(self.numbers.shape, np.int64)
        numbers[_IN_FLIGHT] = -1
        numbers[_SLOT] = self._cache.spare * self._cache.block
        numbers[_USED] = 1
        numbers[_TABLE] = self._cache.spare
        numbers[:_UNIFORM, :count] = batch.tokens, batch.positions, batch.sampled_rows, batch.slots, batch.used
        numbers[_UNIFORM:_TABLE] = np.array([uniforms, *sampling], np.float64).view(np.int64).reshape(-1, rows)
        for row, blocks in enumerate(batch.blocks):
            numbers[_TABLE : _TABLE + len(blocks), row] = blocks
        self.numbers.copy_(device.to_device(torch.from_numpy(numbers), self.numbers.device))
        if self._is_new:
            self._is_new = False
            if flash.flash_attention(self._cache.values, paged=True) is not None:
                most = self._owner.width * self._cache.block
                self._recorded = device.recorded(lambda: self._compute(most), self.numbers.device)
        if self._recorded is not None:
            self._recorded()
        else:
            self._compute(max(batch.used))

    @torch.no_grad()
    def _compute(self, longest: int) -> None:
        """`longest`: tokens of the longest sequence."""
        # Recording calls it more than once: what it reads stays as it is.
        packed = self._owner.packed
        tokens, positions, sampled_rows, slots, used = self.numbers[:_UNIFORM]
        used, table = used.int(), self.numbers[_TABLE:].t().int().contiguous()
        ends = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        lists = (self._begins, ends, used, used, table)
        tensors = BatchTensors(tokens, positions, sampled_rows, slots, *lists, max_q=1, max_k=longest)
        tokens = tensors.known_tokens(self._owner.last_sampled)
        hidden = packed.hidden(tokens, positions, PagedAttention(self._cache, tensors))
        self.logits = packed.logits(hidden)
        if self._flags is not None:
            numbers = self.numbers[_UNIFORM:_TABLE].view(torch.float64)
            sampling = SamplingTable(self._flags, numbers[1:])
            self.tokens, self.log_probs = sample(self.logits, numbers[0], sampling)
