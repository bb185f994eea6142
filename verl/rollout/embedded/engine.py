"""The embedded engine: generation on the trained tensors themselves, in the trainer's process.

Continuous batching: each step computes one token of every running response and a chunk of the prompts that are not
prefilled yet; waiting responses start as soon as others finish. Responses with equal prompts share one prefill and one
copy of the prompt's keys and values; prompts share those of a common prefix. When the cache is full, the newest
response is preempted and recomputed later; its random numbers, and so its tokens, stay the same.

On an accelerator a step is launched before the tokens of the one before are read (`ahead`), so that the device does not
wait for the host. A response whose end is found that way has had one token computed too many, which is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.device import free_memory, is_host, to_device
from verl.errors import ConfigError, ModelError, RolloutError
from verl.models.packed import PackedModel
from verl.models.rope import original_length
from verl.rollout.base import Request, Sample, check_new
from verl.rollout.embedded.attention import ScheduledBatch
from verl.rollout.embedded.decode import Decoder
from verl.rollout.embedded.kv_cache import KVCache, block_tokens, blocks_for
from verl.rollout.embedded.response import PendingTokens, Response, draw
from verl.rollout.embedded.runner import FIXED_ROWS, Runner
from verl.weights.cuts import local_part
from verl.weights.shard import Shard
from verl.weights.shards import take_model_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class EngineStats:
    """What the engine did since it was made; seconds are wall-clock."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0


@dataclass(eq=False)
class _Prompt:
    """A prompt with running responses; `hidden` `[d]` is the final state of its last token after the prefill."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    hidden: Tensor | None = None
    running: list[_Sequence] = field(default_factory=list)


@dataclass(eq=False)
class _Sequence:
    """A response with its own blocks, of `block` tokens; its first `computed` tokens are in the cache."""

    response: Response
    prompt_key: tuple[int, ...]
    block: int
    prompt: _Prompt | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    row: int = 0
    """Its row in the last draw."""

    def tokens(self, most: int) -> list[int]:
        """Its next tokens to compute, at most so many; one in flight is -1 - i, where i is its row in the last draw."""
        response = self.response
        chunk = response.tokens[self.computed : self.computed + most]
        if response.in_flight and len(chunk) < most:
            chunk.append(-1 - self.row)
        return chunk

    @property
    def tail(self) -> int:
        """Tokens of the prompt after its last full block; they are copied into the response's first block."""
        return len(self.response.prompt) % self.block

    @property
    def needed(self) -> int:
        """Blocks for its tokens and the next one."""
        tokens = min(self.response.drawn + 1, self.response.max_new_tokens)
        return blocks_for(self.tail + tokens, self.block)


class EmbeddedEngine:
    """Continuous batching over a `PackedModel`. See `RolloutEngine` for the methods.

    Ranks that share the model by tensor parallelism all make an engine of equal arguments. The first of them is given
    the requests, and the others `follow` it.

    Args:
        packed: the model; its weights are read where they are, never copied.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        tokenizer: for stop strings, guards and grammars.
        max_batch: responses that run at a time.
        kv_memory: bytes of the KV cache; None: as much as `max_batch` responses of `max_length` need, half of the
            free memory at most. Without the CPU's kernels there is one block more, which padding is written to.
        max_length: prompt and response together; None: what the model allows.
        step_tokens: prompt tokens computed in one step, besides one token of each running response.
        batch_invariant: every forward has the same shape (64 tokens), so a response is bit for bit the same beside any
            other responses and after any preemption, at the price of speed.
        compiled: on CPU use the compiled kernels where they can be built.
        ahead: launch a step before the tokens of the one before are read, decode steps from memory that stays where it
            is; None: on an accelerator. Not where ranks share the model.

    Raises:
        ModelError: the model has no packed forward, or its layers have keys and values of different shapes.
        ConfigError: the memory is too small for two blocks, or a number is not positive.
    """

    #: Its log-probs come from the trainer's own kernels on the live weights.
    exact = True
    is_live = True

    def __init__(
        self,
        packed: PackedModel,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_batch: int = 256,
        kv_memory: int | None = None,
        max_length: int | None = None,
        step_tokens: int = 2048,
        batch_invariant: bool = False,
        compiled: bool = True,
        ahead: bool | None = None,
    ) -> None:
        if not packed.supports_paged:
            lack = "keys and values of one shape, once a layer," if packed.supports_packed else "packed forward"
            raise ModelError(f"{type(packed.model).__name__} has no {lack}: generate with the 'hf' rollout engine")
        if max_batch < 1 or step_tokens < 1:
            raise ConfigError(f"rollout: max_batch ({max_batch}) and step_tokens ({step_tokens}) must be positive")
        self.packed = packed
        self.seed = seed
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_batch = max_batch
        self.max_length = _max_length(packed, max_length)
        self.step_tokens = step_tokens
        self.batch_invariant = batch_invariant
        self.compiled = compiled
        self._model_state: list[tuple[int, int]] = []
        self.policy_version = 0
        self.stats = EngineStats()
        self.cache = self._make_cache(kv_memory)
        self.runner = Runner(
            packed, self.cache, batch_invariant=batch_invariant, max_batch=max_batch, compiled=compiled
        )
        self.ahead = (not is_host(packed.device) if ahead is None else ahead) and packed.tensor_group is None
        self._decoder: Decoder | None = None
        if self.ahead and self.cache.kernels is None and not batch_invariant:
            self._decoder = Decoder(
                packed, self.cache, max_batch=self.runner.filled(max_batch), max_length=self.max_length
            )
        #: What was drawn last and is not read yet, and its tokens.
        self._drawn: list[PendingTokens] = []
        self._last: Tensor | None = None
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._by_id: dict[str, _Sequence] = {}
        self._finished: list[_Sequence] = []

    @property
    def unfinished(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RolloutError: it is invalid (empty or over-long prompt, unknown token, stop strings without a tokenizer),
                does not fit the cache, or its id is in use.
        """
        check_new(request, self._by_id)
        response = Response(
            request,
            seed=self.seed,
            vocab_size=self.packed.vocab_size,
            max_length=self.max_length,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
        )
        own = len(response.prompt) % self.cache.block + response.max_new_tokens
        needed = self.cache.blocks_for(len(response.prompt)) + self.cache.blocks_for(own)
        if needed > self.cache.num_blocks:
            raise RolloutError(
                f"request '{request.id}' may need {needed * self.cache.block} tokens of KV cache, there is room for "
                f"{self.cache.tokens}: give the rollout more memory or shorten prompts or responses"
            )
        if not self._by_id:
            self._look_at_model()
        sequence = _Sequence(response, tuple(response.prompt), self.cache.block)
        self._by_id[request.id] = sequence
        (self._waiting if response.finish is None else self._finished).append(sequence)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Prefill a chunk of prompts, sample the next token of every running response, return the finished samples.

        Raises:
            RolloutError: the logits are not finite, or the engine sleeps while requests wait.
        """
        if self.cache.asleep and self._waiting:
            raise RolloutError("the rollout engine sleeps while requests wait: call wake() first")
        try:
            if any(sequence.response.reads_tokens for sequence in self._running):
                self._read(self._drawn)
            self._admit()
            self._make_room()
            plan = ScheduledBatch(self.cache.block)
            read = self._plan_prompts(plan)
            rows, copies = self._plan_responses(plan)
            before = self._drawn
            self._drawn = self._compute(plan, read, rows, copies)
            self._read(before)
            if not self.ahead:
                self._read(self._drawn)
        except BaseException:
            # Blocks are marked as filled when they are planned, so the cache is not valid.
            self._put_all_back()
            self.cache.clear()
            raise
        done, self._finished = self._finished, []
        for sequence in done:
            del self._by_id[sequence.response.id]
        if not self._by_id:
            self._drawn = []
        return [sequence.response.sample(self.policy_version) for sequence in done]

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them. Ids of no request are ignored."""
        for name in ids:
            sequence = self._by_id.get(name)
            if sequence is None or sequence.response.finish is not None:
                continue
            sequence.response.finish = "abort"
            self._end(sequence)

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights in place; nothing is copied for tensors that are the model's own.

        Running responses continue under the new weights, after their keys and values are recomputed.

        Raises:
            CheckpointError: a shard does not fit the model.
        """
        self._read(self._drawn)
        take_model_shards(self.packed.model, shards)
        self._put_all_back()
        self.cache.clear()
        self._look_at_model()
        self.policy_version = version

    def sleep(self) -> None:
        """Free the memory of the KV cache; unfinished requests are kept. Ranks that follow this one go on."""
        self._read(self._drawn)
        self._put_all_back()
        self.cache.release()
        self.runner.end()
        if self._decoder is not None:
            self._decoder.forget()

    @property
    def leads(self) -> bool:
        """Whether this rank is given requests."""
        return self.runner.leads

    def follow(self) -> None:
        """Compute what the rank that leads decides, until it sleeps."""
        self.runner.follow()

    def wake(self) -> None:
        """Allocate the KV cache again after `sleep`."""
        if self.cache.asleep:
            self.cache.allocate()

    def _look_at_model(self) -> None:
        """Clear the cache if the model has changed since the last rollout (trained, or given adapters).

        Raises:
            RolloutError: it has another dtype or device.
        """
        if (self.packed.dtype, self.packed.device) != (self.cache.dtype, self.cache.device):
            raise RolloutError(
                f"the model is now {self.packed.dtype} on {self.packed.device}, the rollout engine was made for "
                f"{self.cache.dtype} on {self.cache.device}: make a new engine"
            )
        weights = map(local_part, self.packed.model.parameters())
        state = [(weight.data_ptr(), weight._version) for weight in weights]
        if state != self._model_state:
            if self._decoder is not None and [at for at, _ in state] != [at for at, _ in self._model_state]:
                self._decoder.forget()
            self._model_state = state
            self.cache.clear()
        self.runner.look_at_model()

    def _make_cache(self, kv_memory: int | None) -> KVCache:
        packed = self.packed
        tokens = block_tokens(packed.device)
        size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype, tokens)
        if kv_memory is None:
            wanted = 2 * self.max_batch * blocks_for(self.max_length, tokens) * size
            kv_memory = _least(min(wanted, free_memory(packed.device) // 2), packed.tensor_group)
        if kv_memory < 2 * size:
            raise ConfigError(
                f"rollout: a KV cache of {kv_memory} bytes is too small: a prompt and its response take at least "
                f"{2 * size} bytes with this model"
            )
        return KVCache(
            kv_memory // size,
            packed.num_layers,
            packed.num_kv_heads,
            packed.head_dim,
            packed.dtype,
            packed.device,
            self.compiled,
        )

    def _admit(self) -> None:
        """Start waiting responses while the batch and the cache have room."""
        while self._waiting and len(self._running) < self.max_batch:
            sequence = self._waiting[0]
            prompt = self._prompts.get(sequence.prompt_key)
            blocks = None if prompt else self.cache.take_prompt(sequence.prompt_key)
            if prompt is None and blocks is None:
                return
            own = self.cache.take(sequence.needed)
            if own is None:
                self.cache.drop(blocks or [])
                return
            if prompt is None:
                assert blocks is not None
                prompt = self._prompts[sequence.prompt_key] = _Prompt(sequence.response.prompt, blocks)
            self._waiting.popleft()
            sequence.prompt, sequence.blocks, sequence.computed = prompt, own, 0
            prompt.running.append(sequence)
            self._running.append(sequence)

    def _make_room(self) -> None:
        """Take a block for each response whose next token needs one; if none is left, preempt the newest response."""
        for sequence in list(self._running):
            while sequence.prompt is not None and sequence.needed > len(sequence.blocks):
                block = self.cache.take(1)
                if block is not None:
                    sequence.blocks += block
                else:
                    self.stats.preemptions += 1
                    self._put_back(self._running[-1])

    def _plan_prompts(self, plan: ScheduledBatch) -> list[tuple[_Prompt, int]]:
        """Plan chunks of prompts in their order of arrival. Returns those that this step completes, with the index of
        their last token."""
        budget, read, size = self.step_tokens, [], self.cache.block
        for prompt in self._prompts.values():
            if prompt.hidden is not None:
                continue
            if budget == 0:
                break
            # Skip blocks that another prompt has filled, or fills in this step.
            while prompt.computed % size == 0 and prompt.computed + size < len(prompt.tokens):
                if not self.cache.filled[prompt.blocks[prompt.computed // size]]:
                    break
                prompt.computed += size
            end = min(prompt.computed + budget, len(prompt.tokens))
            chunk = prompt.tokens[prompt.computed : end]
            index = plan.add(chunk, prompt.computed, prompt.blocks, len(prompt.blocks))
            budget -= end - prompt.computed
            for block in prompt.blocks[prompt.computed // size : end // size]:
                self.cache.filled[block] = True
            prompt.computed = end
            if end == len(prompt.tokens):
                read.append((prompt, index))
        self.stats.prompt_tokens += self.step_tokens - budget
        return read

    def _plan_responses(self, plan: ScheduledBatch) -> tuple[list[tuple[_Sequence, int]], list[tuple[int, int]]]:
        """Plan the tokens of responses whose prompts are prefilled.

        Returns:
            Responses to sample for, with the index of their last token (-1: no token yet, sample from the prompt's last
            state); and blocks to copy first: a prompt's last block, if it is not full, to each response's first.
        """
        rows: list[tuple[_Sequence, int]] = []
        copies: list[tuple[int, int]] = []
        budget = max(0, self.step_tokens - len(plan.tokens))
        for prompt in self._prompts.values():
            if prompt.computed < len(prompt.tokens):
                continue
            for sequence in prompt.running:
                if sequence.response.is_full:  # its last token is on its way
                    continue
                chunk = sequence.tokens(max(1, budget))
                index = -1
                if chunk and prompt.hidden is None:  # prefilled in this step: there is nothing to copy yet
                    continue
                if chunk:
                    if sequence.computed == 0 and sequence.tail:
                        copies.append((prompt.blocks[-1], sequence.blocks[0]))
                    shared = len(prompt.tokens) // self.cache.block
                    start = len(prompt.tokens) + sequence.computed
                    index = plan.add(chunk, start, prompt.blocks[:shared] + sequence.blocks, shared)
                    sequence.computed += len(chunk)
                    budget -= len(chunk) - 1
                    self.stats.recomputed_tokens += len(chunk) - 1
                if sequence.computed == sequence.response.drawn:
                    rows.append((sequence, index))
        return rows, copies

    def _compute(
        self,
        plan: ScheduledBatch,
        read: list[tuple[_Prompt, int]],
        rows: list[tuple[_Sequence, int]],
        copies: list[tuple[int, int]],
    ) -> list[PendingTokens]:
        """Compute the planned tokens, and draw one for each of `rows`."""
        decoder, responses = self._decoder, [sequence.response for sequence, _ in rows]
        for row, (sequence, _) in enumerate(rows):
            sequence.row = row
        decodes = plan.decodes and rows and len(rows) == len(plan.tokens) and self.packed.ready is None
        if decoder is not None and decodes:
            started = time.perf_counter()
            self.cache.copy(copies)
            self._carry_to(decoder)
            drawn = [decoder.step(plan, self.runner.filled(len(rows)), responses, self.policy_version)]
            self._last = decoder.last
            self.stats.steps += 1
            self.stats.forward_seconds += time.perf_counter() - started
            return drawn
        hidden = self._forward(plan, read, copies)
        drawn = self._draw(rows, hidden)
        self._last = torch.cat([one.tokens for one in drawn]) if self.ahead and drawn else None
        return drawn

    def _carry_to(self, decoder: Decoder) -> None:
        """Put the tokens in flight where the decoder reads them."""
        if self._last is not None and self._last is not decoder.last:
            decoder.last[: len(self._last)].copy_(self._last)

    def _read(self, drawn: list[PendingTokens]) -> None:
        """Add what was drawn to its responses, and release those that have ended."""
        started = time.perf_counter()
        for one in drawn:
            going_on = [response for response in one.responses if response.finish is None]
            try:
                one.take()
            finally:
                for response in going_on:
                    if response.finish is not None:
                        self._end(self._by_id[response.id])
            self.stats.generated_tokens += len(going_on)
        if drawn is self._drawn:
            self._drawn = []
        self.stats.sampling_seconds += time.perf_counter() - started

    def _end(self, sequence: _Sequence) -> None:
        if sequence.prompt is None:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        self._finished.append(sequence)

    def _forward(self, plan: ScheduledBatch, read: list[tuple[_Prompt, int]], copies: list[tuple[int, int]]) -> Tensor:
        """Final hidden states `[T, d]` of the planned tokens; completed prompts keep their last one."""
        started = time.perf_counter()
        hidden = self.runner.hidden(plan, copies, self._last)
        for prompt, index in read:
            prompt.hidden = hidden[index].clone()
        self.stats.steps += bool(plan.tokens)
        self.stats.forward_seconds += time.perf_counter() - started
        return hidden

    def _draw(self, rows: list[tuple[_Sequence, int]], hidden: Tensor) -> list[PendingTokens]:
        """Draw a token for each of `rows`."""
        if not rows:
            return []
        started = time.perf_counter()
        first = [s.prompt.hidden for s, index in rows if index < 0 and s.prompt and s.prompt.hidden is not None]
        # States of prompts, for responses without a token, follow those of this step.
        states = torch.cat([hidden, torch.stack(first)]) if first else hidden
        fresh = iter(range(len(hidden), len(states)))
        index = [next(fresh) if index < 0 else index for _, index in rows]
        size = FIXED_ROWS if self.batch_invariant else len(rows)
        drawn = []
        for start in range(0, len(rows), size):
            some = index[start : start + size]
            some += some[:1] * (self.runner.filled(len(some)) - len(some))
            logits = self.runner.logits(states.index_select(0, to_device(torch.tensor(some), hidden.device)))
            responses = [sequence.response for sequence, _ in rows[start : start + size]]
            drawn.append(draw(responses, logits, self.policy_version, self.compiled))
        self.stats.sampling_seconds += time.perf_counter() - started
        return drawn

    def _leave(self, sequence: _Sequence) -> None:
        """Remove a running response and free its blocks; those of its prompt too, if it was the last one."""
        prompt = sequence.prompt
        assert prompt is not None
        self._running.remove(sequence)
        prompt.running.remove(sequence)
        self.cache.drop(sequence.blocks)
        sequence.prompt, sequence.blocks, sequence.computed = None, [], 0
        if not prompt.running:
            del self._prompts[sequence.prompt_key]
            self.cache.drop(prompt.blocks)

    def _put_back(self, sequence: _Sequence) -> None:
        self._leave(sequence)
        self._waiting.appendleft(sequence)

    def _put_all_back(self) -> None:
        self._drawn = []
        for sequence in reversed(self._running.copy()):
            sequence.response.in_flight = 0
            self._put_back(sequence)


def _least(number: int, group: Any) -> int:
    """The least of the ranks of a group."""
    if group is not None:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        number = int(found)
    return number


def _max_length(packed: PackedModel, wanted: int | None) -> int:
    limits = [limit for limit in (wanted, packed.max_positions, original_length(packed.config)) if limit is not None]
    if not limits:
        raise ConfigError("rollout: the model states no longest position: set max_length")
    if min(limits) < 2:
        raise ConfigError(f"rollout: max_length must be at least 2, got {min(limits)}")
    return min(limits)
