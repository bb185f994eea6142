"""The embedded engine: generation on the very tensors that are trained, in the trainer's own process.

Each step feeds one token of every running response and a chunk of the prompts that are still being read. A
finished response gives its place to the next one at once. Responses whose prompts are equal share one prefill and
one copy of the prompt's keys and values; prompts share those of a common beginning. When the cache is full the
response that came last is put back and later recomputed: its random numbers do not change, so nor do its tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.device import free_memory
from verl.errors import ConfigError, ModelError, RolloutError
from verl.models.compiled import kernels
from verl.models.log_probs import linear_into
from verl.models.packed import PackedModel
from verl.models.rope import original_length
from verl.models.shards import take_model_shards
from verl.rollout.attention import PagedAttention, Plan
from verl.rollout.base import Request, Sample
from verl.rollout.kv_cache import BLOCK, KVCache, blocks_for
from verl.rollout.response import Response, draw
from verl.shard import Shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Matrix products treat rows by fours or so and a remainder otherwise, in another order of summation. With the rows of
# a step filled up to a multiple of 8, a token's numbers do not depend on how many others there are. Multiples of a
# sixteenth are taken, as a library keeps code for every shape that it has met (oneDNN: half a megabyte).
_ROWS, _SIZES = 8, 16
# What oneDNN keeps in all, measured on a rollout with preemptions.
_KEPT_FOR_PRODUCTS = 48 << 20
# Where that shall hold by construction, every product has this many rows.
_FIXED_ROWS = 64


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
    """A prompt with running responses; `hidden` `[d]` is the final state of its last token once it is read."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    hidden: Tensor | None = None
    running: list[_Sequence] = field(default_factory=list)


@dataclass(eq=False)
class _Sequence:
    """A response with its own blocks; its first `computed` tokens are in the cache."""

    response: Response
    prompt_key: tuple[int, ...]
    prompt: _Prompt | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def tail(self) -> int:
        """Tokens of the prompt behind its last full block: they stand at the beginning of the response's own blocks."""
        return len(self.response.prompt) % BLOCK

    @property
    def needed(self) -> int:
        """Blocks for what it has and its next token."""
        return blocks_for(self.tail + len(self.response.tokens) + 1)


class EmbeddedEngine:
    """Continuous batching over a `PackedModel`. See `RolloutEngine` for the verbs.

    Args:
        packed: the model; its weights are read where they are, never copied.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        tokenizer: needed for stop strings alone.
        max_batch: responses that run at a time.
        kv_memory: bytes of the KV cache; None: as much as `max_batch` responses of `max_length` need, half of the
            free memory at most.
        max_length: prompt and response together; None: what the model allows.
        step_tokens: tokens that one step reads of prompts, the running responses' own come on top.
        batch_invariant: every forward has the same shape, so a response is the same bit for bit in any company and
            after any preemption, whatever the device's matrix products do. The price: 64 tokens at a time.
        compiled: on CPU use the compiled attention where it can be built.

    Raises:
        ModelError: the model has no packed forward, or its keys and values do not fit one cache.
        ConfigError: the memory does not hold one block, or a number is not positive.
    """

    #: Its log-probs come from the trainer's own kernels on the live weights.
    exact = True

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
        self._plain_head = compiled and kernels(packed.dtype, packed.device) is not None and _head_is_plain(packed)
        self._logit_space = torch.empty(0, dtype=packed.dtype)
        self._hidden = packed.inference()
        self._model_state: list[tuple[int, int]] = []
        self.policy_version = 0
        self.stats = EngineStats()
        self.cache = self._make_cache(kv_memory)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._by_id: dict[str, _Sequence] = {}
        self._finished: list[_Sequence] = []

    @property
    def workspace(self) -> int:
        """Bytes that generation takes beside weights and KV cache: what the tokens of a step go through, its logits,
        and on CPU what oneDNN keeps for products in half precision.

        Logits processors and top-p come on top, with some copies of a row of logits for each response that has them.
        """
        packed = self.packed
        tokens, rows = self._filled(self.step_tokens + self.max_batch), self._filled(self.max_batch)
        if self.batch_invariant:
            tokens = rows = _FIXED_ROWS
        width = getattr(packed.config, "intermediate_size", None) or 4 * packed.hidden_size
        heads = (packed.num_heads + packed.num_kv_heads) * packed.head_dim
        layer = 4 * packed.hidden_size + 2 * heads + 2 * width
        kept = _KEPT_FOR_PRODUCTS if packed.device.type == "cpu" and packed.dtype.itemsize == 2 else 0
        return (tokens * layer + rows * packed.vocab_size) * packed.dtype.itemsize + kept

    @property
    def unfinished(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RolloutError: it can never be answered (empty or over-long prompt, unknown token, more than the cache
                holds, stop strings without a tokenizer), or its id is in use.
        """
        if request.id in self._by_id:
            raise RolloutError(f"request '{request.id}' is already being answered: ids must differ")
        response = Response(
            request,
            seed=self.seed,
            vocab_size=self.packed.vocab_size,
            max_length=self.max_length,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
        )
        own = len(response.prompt) % BLOCK + response.max_new_tokens
        needed = blocks_for(len(response.prompt)) + blocks_for(own)
        if needed > self.cache.num_blocks:
            raise RolloutError(
                f"request '{request.id}' may need {needed * BLOCK} tokens of KV cache, there is room for "
                f"{self.cache.num_blocks * BLOCK}: give the rollout more memory or shorten prompts or responses"
            )
        if not self._by_id:
            self._look_at_model()
        sequence = _Sequence(response, tuple(response.prompt))
        self._by_id[request.id] = sequence
        (self._waiting if response.finish is None else self._finished).append(sequence)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Read a chunk of prompts, give every running response its next token; the samples that finished.

        Raises:
            RolloutError: the logits are not finite, or the engine sleeps while requests wait.
        """
        if self.cache.asleep and self._waiting:
            raise RolloutError("the rollout engine sleeps while requests wait: call wake() first")
        self._admit()
        self._make_room()
        plan = Plan()
        read = self._plan_prompts(plan)
        rows, copies = self._plan_responses(plan)
        try:
            self.cache.copy(copies)
            hidden = self._forward(plan, read)
            self._draw(rows, hidden)
        except BaseException:
            # What was planned is not in the cache: nothing of it may be believed.
            self._put_all_back()
            self.cache.clear()
            raise
        done, self._finished = self._finished, []
        for sequence in done:
            del self._by_id[sequence.response.id]
        return [sequence.response.sample(self.policy_version) for sequence in done]

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them. Ids that are not in work are passed over."""
        for name in ids:
            sequence = self._by_id.get(name)
            if sequence is None or sequence.response.finish is not None:
                continue
            sequence.response.finish = "abort"
            if sequence.prompt is None:
                self._waiting.remove(sequence)
            else:
                self._leave(sequence)
            self._finished.append(sequence)

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights in place; tensors that are the model's own (trained in place) are only noted.

        Running responses go on under the new weights, their keys and values recomputed.

        Raises:
            CheckpointError: a shard does not fit the model.
        """
        take_model_shards(self.packed.model, shards)
        self._put_all_back()
        self.cache.clear()
        self._look_at_model()
        self.policy_version = version

    def sleep(self) -> None:
        """Give back the memory of the KV cache; unfinished requests are kept."""
        self._put_all_back()
        self.cache.release()
        self._logit_space = torch.empty(0, dtype=self.packed.dtype)

    def wake(self) -> None:
        """Be ready again after `sleep`; nothing happens when awake."""
        if self.cache.asleep:
            self.cache.allocate()

    def _look_at_model(self) -> None:
        """The model is its user's: between two rollouts it may have been trained, moved, or given adapters."""
        if (self.packed.dtype, self.packed.device) != (self.cache.dtype, self.cache.device):
            raise RolloutError(
                f"the model is now {self.packed.dtype} on {self.packed.device}, the rollout engine was made for "
                f"{self.cache.dtype} on {self.cache.device}: make a new engine"
            )
        state = [(parameter.data_ptr(), parameter._version) for parameter in self.packed.model.parameters()]
        if state != self._model_state:
            self._model_state = state
            self.cache.clear()
        self._hidden = self.packed.inference()

    def _make_cache(self, kv_memory: int | None) -> KVCache:
        packed = self.packed
        size = KVCache.block_bytes(packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype)
        if kv_memory is None:
            wanted = 2 * self.max_batch * blocks_for(self.max_length) * size
            kv_memory = min(wanted, free_memory(packed.device) // 2)
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
        """Let waiting responses run while there is a place and room for their prompt and next block."""
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
        """A block for each response whose next token begins one; when none is left the last to come gives way."""
        for sequence in list(self._running):
            while sequence.prompt is not None and sequence.needed > len(sequence.blocks):
                block = self.cache.take(1)
                if block is not None:
                    sequence.blocks += block
                else:
                    self.stats.preemptions += 1
                    self._put_back(self._running[-1])

    def _plan_prompts(self, plan: Plan) -> list[tuple[_Prompt, int]]:
        """Chunks of the prompts in their order of arrival; those read to the end, with their last token's index."""
        budget, read = self.step_tokens, []
        for prompt in self._prompts.values():
            if prompt.hidden is not None:
                continue
            if budget == 0:
                break
            # What another prompt has put, or puts in this step, into a shared block need not be computed again.
            while prompt.computed % BLOCK == 0 and prompt.computed + BLOCK < len(prompt.tokens):
                if not self.cache.is_filled(prompt.blocks[prompt.computed // BLOCK]):
                    break
                prompt.computed += BLOCK
            end = min(prompt.computed + budget, len(prompt.tokens))
            chunk = prompt.tokens[prompt.computed : end]
            index = plan.add(chunk, prompt.computed, prompt.blocks, len(prompt.blocks))
            budget -= end - prompt.computed
            for block in prompt.blocks[prompt.computed // BLOCK : end // BLOCK]:
                self.cache.mark_filled(block)
            prompt.computed = end
            if end == len(prompt.tokens):
                read.append((prompt, index))
        self.stats.prompt_tokens += self.step_tokens - budget
        return read

    def _plan_responses(self, plan: Plan) -> tuple[list[tuple[_Sequence, int]], list[tuple[int, int]]]:
        """Feed the responses of prompts that are read; rows to draw from: a response and its last token's index.

        Index -1: the response is empty, its first token follows from the prompt's last state. Also the copies to make
        before: a prompt's last block, where it is not full, into the first one of each response.
        """
        rows: list[tuple[_Sequence, int]] = []
        copies: list[tuple[int, int]] = []
        budget = max(0, self.step_tokens - len(plan.tokens))
        for prompt in self._prompts.values():
            if prompt.computed < len(prompt.tokens):
                continue
            for sequence in prompt.running:
                tokens = sequence.response.tokens
                chunk = tokens[sequence.computed : sequence.computed + max(1, budget)]
                index = -1
                if chunk and prompt.hidden is None:  # read in this very step: there is nothing to copy yet
                    continue
                if chunk:
                    if sequence.computed == 0 and sequence.tail:
                        copies.append((prompt.blocks[-1], sequence.blocks[0]))
                    shared = len(prompt.tokens) // BLOCK
                    start = len(prompt.tokens) + sequence.computed
                    index = plan.add(chunk, start, prompt.blocks[:shared] + sequence.blocks, shared)
                    sequence.computed += len(chunk)
                    budget -= len(chunk) - 1
                    self.stats.recomputed_tokens += len(chunk) - 1
                if sequence.computed == len(tokens):
                    rows.append((sequence, index))
        return rows, copies

    def _forward(self, plan: Plan, read: list[tuple[_Prompt, int]]) -> Tensor:
        """Final hidden states `[T, d]` of the planned tokens; prompts that are read to the end keep their last."""
        started = time.perf_counter()
        if not plan.tokens:
            return torch.empty(0, self.packed.hidden_size, dtype=self.packed.dtype, device=self.packed.device)
        model = self.packed.model
        training = model.training
        if training:
            model.eval()
        try:
            parts = plan.split(_FIXED_ROWS) if self.batch_invariant else [plan]
            states = [self._forward_part(part) for part in parts]
            hidden = states[0] if len(states) == 1 else torch.cat(states)
        finally:
            if training:
                model.train()
        for prompt, index in read:
            prompt.hidden = hidden[index].clone()
        self.stats.steps += 1
        self.stats.forward_seconds += time.perf_counter() - started
        return hidden

    def _forward_part(self, plan: Plan) -> Tensor:
        tokens, device = len(plan.tokens), self.packed.device
        context = PagedAttention(self.cache, plan, _FIXED_ROWS if self.batch_invariant else None)
        filling = [0] * (self._filled(tokens) - tokens)
        hidden = self._hidden(
            torch.tensor(plan.tokens + filling, device=device),
            torch.tensor(plan.positions + filling, device=device),
            context,
        )
        return hidden[:tokens]

    def _filled(self, rows: int) -> int:
        """Rows that a product of so many is computed with."""
        if self.batch_invariant:
            return _FIXED_ROWS
        step = max(_ROWS, (1 << (rows - 1).bit_length()) // _SIZES)
        return -(-rows // step) * step

    def _draw(self, rows: list[tuple[_Sequence, int]], hidden: Tensor) -> None:
        """Sample from the rows, and let go of the responses that are finished."""
        if not rows:
            return
        started = time.perf_counter()
        first = [s.prompt.hidden for s, index in rows if index < 0 and s.prompt and s.prompt.hidden is not None]
        # Rows of empty responses stand after the states of this step.
        states = torch.cat([hidden, torch.stack(first)]) if first else hidden
        fresh = iter(range(len(hidden), len(states)))
        index = [next(fresh) if index < 0 else index for _, index in rows]
        size = _FIXED_ROWS if self.batch_invariant else len(rows)
        try:
            for start in range(0, len(rows), size):
                some = index[start : start + size]
                some += some[:1] * (self._filled(len(some)) - len(some))
                logits = self._logits(states.index_select(0, torch.tensor(some, device=hidden.device)))
                responses = [sequence.response for sequence, _ in rows[start : start + size]]
                draw(responses, logits, self.policy_version, self.compiled)
        finally:
            for sequence, _ in rows:
                if sequence.response.finish is not None:
                    self._leave(sequence)
                    self._finished.append(sequence)
        self.stats.generated_tokens += len(rows)
        self.stats.sampling_seconds += time.perf_counter() - started

    def _logits(self, states: Tensor) -> Tensor:
        """Logits `[N, V]`; without a copy in fp32 where the head is plain and the kernel reads its own dtype."""
        if not self._plain_head:
            return self.packed.logits(states)
        weight, bias = self.packed.head()
        if len(self._logit_space) < len(states):
            self._logit_space = states.new_empty(self._filled(self.max_batch), len(weight))
        return linear_into(states, weight, bias, self._logit_space[: len(states)])

    def _leave(self, sequence: _Sequence) -> None:
        """Take a response out of the running ones; its prompt goes with the last of them."""
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
        for sequence in reversed(self._running.copy()):
            self._put_back(sequence)


@torch.no_grad()
def _head_is_plain(packed: PackedModel) -> bool:
    """Whether logits are the head's linear map and nothing else (no scale, no soft cap)."""
    states = torch.linspace(-3, 3, 2 * packed.hidden_size, dtype=packed.dtype).view(2, -1)
    plain = torch.nn.functional.linear(states, *packed.head())
    return torch.equal(packed.logits(states), plain.to(torch.promote_types(plain.dtype, torch.float32)))


def _max_length(packed: PackedModel, wanted: int | None) -> int:
    limits = [limit for limit in (wanted, packed.max_positions, original_length(packed.config)) if limit is not None]
    if not limits:
        raise ConfigError("rollout: the model states no longest position: set max_length")
    if min(limits) < 2:
        raise ConfigError(f"rollout: max_length must be at least 2, got {min(limits)}")
    return min(limits)
