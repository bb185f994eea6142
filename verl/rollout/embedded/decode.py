"""Decode steps in memory that stays where it is: one token of each running response, padded to one of a few sizes.

A step's numbers (tokens, positions, block tables, how each row is sampled) go to the device as one copy. A token that
the host has not read yet is taken from the step before, on the device. Where the kernels allow it, the forward and the
sampling of each size are recorded once as a CUDA graph and replayed.

Legend: S rows with padding, B blocks of the longest sequence that there can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from verl import device
from verl.attention import varlen
from verl.models.packed import PackedModel, evaluating
from verl.rollout.embedded.attention import PagedAttention, ScheduledBatch, Tables
from verl.rollout.embedded.kv_cache import KVCache
from verl.rollout.embedded.response import PendingTokens, Response, draw, draws_of
from verl.rollout.embedded.sampler import SamplingFlags, SamplingTable, numbers_of, sample

# Rows of `_Step.given`, before those of the block table; the last five are fp64.
_TOKEN, _POSITION, _SLOT, _USED, _UNIFORM, _TABLE = 0, 1, 2, 3, 4, 9


class Decoder:
    """Runs decode steps.

    Args:
        max_length: of prompt and response together.

    Attributes:
        last: `[max_batch]` int64, the tokens of the step before.
    """

    def __init__(self, packed: PackedModel, cache: KVCache, *, max_batch: int, max_length: int) -> None:
        self._packed, self._cache = packed, cache
        self._width = cache.blocks_for(max_length)
        self.last = torch.zeros(max_batch, dtype=torch.int64, device=packed.device)
        self.forget()

    def forget(self) -> None:
        """Weights or keys and values are elsewhere now."""
        self._steps: dict[tuple[int, SamplingFlags | None], _Step] = {}

    def step(
        self, plan: ScheduledBatch, rows: int, responses: Sequence[Response], policy_version: int
    ) -> PendingTokens:
        """Draw the next token of each response, given its last one in `plan`; `rows`: those to compute."""
        # Edits are the caller's code, so what they change is sampled outside of the recorded step.
        is_edited = any(response.edited or response.mask is not None for response in responses)
        params, uniforms = draws_of(responses, rows)
        ways = None if is_edited else SamplingFlags.of(params)
        step = self._steps.get((rows, ways))
        if step is None:
            step = self._steps[rows, ways] = _Step(self, rows, ways)
        step.give(plan, uniforms, numbers_of(params))
        model = self._packed.model
        with evaluating(model) if model.training else nullcontext():
            step.run(max(plan.used))
        if ways is None:
            drawn = draw(responses, step.logits, policy_version, compiled=False)
        else:
            drawn = PendingTokens(responses, step.tokens, step.log_probs, policy_version, step.logits.dtype)
        self.last[:rows].copy_(drawn.tokens)
        return drawn


class _Step:
    """A decode step of one size and one way of sampling; `ways` None: it ends with the logits.

    Attributes:
        given: `[9 + B, S]` int64, all that the step reads but weights and cache.
        logits: `[S, V]`, fp32 or fp64; overwritten where the step samples.
        tokens, log_probs: `[S]` int64 and fp64.
    """

    def __init__(self, owner: Decoder, rows: int, ways: SamplingFlags | None) -> None:
        self._owner, self._ways = owner, ways
        self._packed, self._cache = owner._packed, owner._cache
        self._width = owner._width
        self.given = torch.zeros(_TABLE + self._width, rows, dtype=torch.int64, device=self._packed.device)
        self._begins = torch.arange(rows + 1, dtype=torch.int32, device=self._packed.device)
        self._recorded: Callable[[], None] | None = None
        self._is_new = True

    def give(self, plan: ScheduledBatch, uniforms: np.ndarray, sampling: list[list[float]]) -> None:
        """Copy a step's numbers. Padding is a first token whose key and value go to the spare block."""
        rows, count = self.given.shape[1], len(plan.tokens)
        numbers = np.zeros(self.given.shape, np.int64)
        numbers[_SLOT] = self._cache.spare * self._cache.block
        numbers[_USED] = 1
        numbers[_TABLE] = self._cache.spare
        numbers[:_UNIFORM, :count] = [plan.tokens, plan.positions, plan.slots(), plan.used]
        numbers[_UNIFORM:_TABLE] = np.array([uniforms, *sampling], np.float64).view(np.int64).reshape(-1, rows)
        for row, blocks in enumerate(plan.blocks):
            numbers[_TABLE : _TABLE + len(blocks), row] = blocks
        self.given.copy_(device.to_device(torch.from_numpy(numbers), self.given.device))

    def run(self, longest: int) -> None:
        """Compute it; `longest`: tokens of the longest sequence."""
        if self._is_new:
            self._is_new = False
            if varlen.flash_attention(self._cache.values, paged=True) is not None:
                self._recorded = device.recorded(
                    lambda: self._compute(self._width * self._cache.block), self.given.device
                )
        if self._recorded is not None:
            self._recorded()
        else:
            self._compute(longest)

    @torch.no_grad()
    def _compute(self, longest: int) -> None:
        # Recording calls it more than once: what it reads stays as it is.
        given, last = self.given, self._owner.last
        tokens = given[_TOKEN]
        tokens = torch.where(tokens < 0, last.index_select(0, (-1 - tokens).clamp(min=0)), tokens)
        used = given[_USED].int()
        table = given[_TABLE:].t().int().contiguous()
        ends = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        tables = Tables(self._begins, ends, used, table, used, given[_SLOT], max_q=1, max_k=longest)
        hidden = self._packed.inference()(tokens, given[_POSITION], PagedAttention(self._cache, tables))
        self.logits = self._packed.logits(hidden)
        if self._ways is None:
            return
        uniforms, inverse, top_k, top_p, min_p = given[_UNIFORM:_TABLE].view(torch.float64)
        ways = SamplingTable(self._ways, inverse, top_k.long(), top_p, min_p)
        self.tokens, self.log_probs = sample(self.logits, uniforms, ways, compiled=False)
