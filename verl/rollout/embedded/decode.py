"""Decode steps in memory that stays where it is: one token of each running response, padded to one of a few sizes.

A step's numbers (tokens, positions, block tables, how each row is sampled) go to the device as one copy. A token in
flight is taken from the step before, on the device. Where the kernels allow it, the forward and the
sampling of each size are recorded once as a CUDA graph and replayed.

Legend: S rows with padding, B blocks of the longest sequence that there can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from verl._host import device
from verl.attention import flash
from verl.rollout.embedded.attention import BatchTensors
from verl.rollout.embedded.kv_cache import blocks_for
from verl.rollout.embedded.sampler import SamplingFlags, sample
from verl.rollout.embedded.scheduler import ScheduledBatch

if TYPE_CHECKING:
    from verl.rollout.embedded.runner import ModelRunner

# Rows of `DecodeStep.numbers`, before those of the block table; the last five are fp64.
_TOKEN, _POSITION, _IN_FLIGHT, _SLOT, _USED, _UNIFORM, _TABLE = 0, 1, 2, 3, 4, 5, 10


class DecodeStep:
    """A decode step of one size and one way of sampling; `flags` None: it ends with the logits. It is dropped when
    weights or KV cache move in memory.

    Attributes:
        numbers: `[10 + B, S]` int64, all that the step reads but weights, cache and the step before.
        logits: `[S, V]`, fp32 or fp64; overwritten where the step samples.
        tokens, log_probs: `[S]` int64 and fp64.
    """

    def __init__(self, runner: ModelRunner, rows: int, flags: SamplingFlags | None) -> None:
        self._runner, self._flags, self._cache = runner, flags, runner.cache
        self._width = blocks_for(runner.max_length, runner.cache.block)
        self.numbers = torch.zeros(_TABLE + self._width, rows, dtype=torch.int64, device=runner.cache.device)
        self._begins = torch.arange(rows + 1, dtype=torch.int32, device=runner.cache.device)
        self._recorded: Callable[[], None] | None = None
        self._is_new = True

    def run(self, batch: ScheduledBatch, sampling: npt.NDArray[np.float64]) -> None:
        """Copy the step's numbers, `sampling_table` among them, to the device, and compute it."""
        # Padding is a first token whose key and value go to the block behind the others.
        count = len(batch.tokens)
        numbers = np.zeros(self.numbers.shape, np.int64)
        numbers[_IN_FLIGHT] = -1
        numbers[_SLOT] = self._cache.num_blocks * self._cache.block
        numbers[_USED] = 1
        numbers[_TABLE] = self._cache.num_blocks
        numbers[:_UNIFORM, :count] = batch.tokens, batch.positions, batch.sampled_rows, batch.slots, batch.used
        numbers[_UNIFORM:_TABLE] = sampling.view(np.int64)
        for row, blocks in enumerate(batch.blocks):
            numbers[_TABLE : _TABLE + len(blocks), row] = blocks
        self.numbers.copy_(device.to_device(torch.from_numpy(numbers), self.numbers.device))
        if self._is_new:
            self._is_new = False
            if flash.flash_attention(self._cache.values, paged=True) is not None:
                most = self._width * self._cache.block
                self._recorded = device.recorded(lambda: self._compute(most), self.numbers.device)
        if self._recorded is not None:
            self._recorded()
        else:
            self._compute(max(batch.used))

    @torch.no_grad()
    def _compute(self, longest: int) -> None:
        """`longest`: tokens of the longest sequence."""
        # Recording calls it more than once: what it reads stays as it is.
        tokens, positions, sampled_rows, slots, used = self.numbers[:_UNIFORM]
        used, table = used.int(), self.numbers[_TABLE:].t().int().contiguous()
        ends = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        lists = (self._begins, ends, used, used, table)
        tensors = BatchTensors(tokens, positions, sampled_rows, slots, *lists, max_q=1, max_k=longest)
        self.logits = self._runner.packed.logits(self._runner.hidden(tensors))
        if self._flags is not None:
            table = self.numbers[_UNIFORM:_TABLE].view(torch.float64)
            self.tokens, self.log_probs = sample(self.logits, self._flags, table)
