"""The embedded engine: generation on the trained tensors themselves, in the trainer's process.

A step is three calls: `Scheduler.schedule` decides what to compute, `ModelRunner.run` computes it and samples the next
tokens, `PendingTokens.take` reads them and appends them to their responses. A preempted response gets the same random
numbers again, and so the same tokens.

On an accelerator a step is launched before the tokens of the one before are read (`look_ahead`), so that the device
does not wait for the host. A response whose end is found that way has one token too many, which is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl._host.device import free_memory, is_host
from verl.errors import ConfigError, ModelError, RolloutError
from verl.models.packed import PackedModel
from verl.models.rope import original_length
from verl.rollout.base import Request, Sample, check_new
from verl.rollout.embedded.kv_cache import KVCache, block_tokens, blocks_for
from verl.rollout.embedded.response import PendingTokens, Response, ResponseOptions
from verl.rollout.embedded.runner import ModelRunner
from verl.rollout.embedded.scheduler import EngineOptions, Scheduler
from verl.weights.shard import Shard, local_part
from verl.weights.shards import take_model_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EmbeddedEngine:
    """Continuous batching over a `PackedModel`. See `RolloutEngine` for the methods.

    Ranks that share the model by tensor parallelism all make an engine of equal arguments. The first, the driver, is
    given the requests, and the others run `ModelRunner.worker_loop`.

    Args:
        packed: the model; its weights are read where they are, never copied.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        tokenizer: for stop strings, guards and grammars.
        kv_memory: bytes of the KV cache; None: as much as `max_batch` responses of `max_length` need, half of the
            free memory at most. Without the CPU's kernels one more block is allocated, which padding is written to.
        max_length: prompt and response together; None: what the model allows.
        **options: the fields of `EngineOptions`.

    Raises:
        ModelError: the model has no packed forward, or its layers have keys and values of different shapes.
        ConfigError: the memory is too small for two blocks, or a number is not positive.
    """

    is_live = tells_top = True

    def __init__(
        self,
        packed: PackedModel,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kv_memory: int | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        if not packed.supports_paged:
            lack = "keys and values of one shape, once a layer," if packed.supports_packed else "packed forward"
            raise ModelError(f"{type(packed.model).__name__} has no {lack}: generate with the 'hf' rollout engine")
        self.packed = packed
        self.max_length = _max_length(packed, max_length)
        self._responses = ResponseOptions(seed, packed.vocab_size, self.max_length, tuple(eos_token_ids), tokenizer)
        on_device = not is_host(packed.device)
        #: Whether its log-probs are the trainer's own numbers. On a device attention over pages, and products of a few
        #: rows, take other kernels than a training step.
        self.exact = not on_device
        self.options = EngineOptions(**options)
        ahead = on_device if self.options.look_ahead is None else self.options.look_ahead
        self.options = replace(self.options, look_ahead=ahead and packed.tensor_group is None)
        self.policy_version = 0
        self.cache = _make_cache(packed, kv_memory, self.max_length, self.options)
        self.scheduler = Scheduler(self.cache, self.options)
        self.runner = ModelRunner(packed, self.cache, self.options, self.max_length)
        self._model_state: list[tuple[int, int]] = []
        #: Tokens in flight, as the steps sampled them.
        self._pending: list[PendingTokens] = []
        self._by_id: dict[str, Response] = {}
        self._finished: list[Response] = []

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
        response = Response(request, self._responses)
        prompt, size = len(response.prompt), self.cache.block
        needed = blocks_for(prompt, size) + blocks_for(prompt % size + response.max_new_tokens, size)
        if needed > self.cache.num_blocks:
            raise RolloutError(
                f"request '{request.id}' may need {needed * size} tokens of KV cache, there is room for "
                f"{self.cache.num_blocks * size}: give the rollout more memory or shorten prompts or responses"
            )
        if not self._by_id:
            self._look_at_model()
        self._by_id[request.id] = response
        (self.scheduler.waiting if response.finish is None else self._finished).append(response)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Prefill a chunk of prompts, sample the next token of every running response, return the finished samples.

        Raises:
            RolloutError: the logits are not finite, or the engine sleeps while requests wait.
        """
        if self.cache.asleep and self.scheduler.waiting:
            raise RolloutError("the rollout engine sleeps while requests wait: call wake() first")
        # Looking ahead, the tokens of the step before are unread while the next one is planned. A grammar's mask, or a
        # caller's edit of the logits, is made of these tokens: where a response has one, they are read first, and
        # nothing overlaps.
        try:
            if any(r.request.processors or r.mask is not None for r in self.scheduler.running):
                self._take()
            # Looking ahead, a step is on the device while the tokens of the one before are read here.
            before = len(self._pending) if self.options.look_ahead else None
            self._pending += self.runner.run(self.scheduler.schedule(), self.policy_version)
            self._take(before)
        except BaseException:
            # Blocks are marked as filled when they are planned, so the cache is not valid.
            self._pending = []
            self.scheduler.preempt_all()
            self.cache.clear()
            raise
        done, self._finished = self._finished, []
        for response in done:
            del self._by_id[response.id]
        if not self._by_id:
            self._pending = []
        return [response.sample(self.policy_version) for response in done]

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them. Ids of no request are ignored."""
        for name in ids:
            response = self._by_id.get(name)
            if response is not None and response.finish is None:
                response.finish = "abort"
                self.scheduler.end(response)
                self._finished.append(response)

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights in place; nothing is copied for tensors that are the model's own.

        Running responses continue under the new weights, after their keys and values are recomputed.

        Raises:
            CheckpointError: a shard does not fit the model.
        """
        self._pause()
        self.cache.clear()
        take_model_shards(self.packed.model, shards)
        self._look_at_model()
        self.policy_version = version

    def sleep(self) -> None:
        """Free the memory of the KV cache; unfinished requests are kept. The worker loops of other ranks end."""
        try:
            self._pause()
        finally:
            self.cache.release()
            self.runner.end()

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
            if [address for address, _ in state] != [address for address, _ in self._model_state]:
                self.runner.decode_steps.clear()
            self._model_state = state
            self.cache.clear()
        self.runner.forward = self.packed.choose_forward()

    def _take(self, count: int | None = None) -> None:
        """Add the first sampled tokens (None: all) to their responses, and free the blocks of those that have ended."""
        taken, self._pending = self._pending[:count], [] if count is None else self._pending[count:]
        for pending in taken:
            going_on = [response for response in pending.responses if response.finish is None]
            try:
                pending.take()
            finally:
                for response in going_on:
                    if response.finish is not None:
                        self.scheduler.end(response)
                        self._finished.append(response)

    def _pause(self) -> None:
        """Read what is in flight, and preempt all responses; where that fails, unread tokens are sampled again."""
        try:
            self._take()
        finally:
            self.scheduler.preempt_all()


def _make_cache(packed: PackedModel, kv_memory: int | None, max_length: int, options: EngineOptions) -> KVCache:
    tokens = block_tokens(packed.device)
    shape = (packed.num_layers, packed.num_kv_heads, packed.head_dim, packed.dtype)
    size = KVCache.block_bytes(*shape, tokens)
    if kv_memory is None:
        wanted = 2 * options.max_batch * blocks_for(max_length, tokens) * size
        kv_memory = min(wanted, free_memory(packed.device) // 2)
        if packed.tensor_group is not None:
            least = torch.tensor(kv_memory)
            dist.all_reduce(least, dist.ReduceOp.MIN, group=packed.tensor_group)
            kv_memory = int(least)
    if kv_memory < 2 * size:
        raise ConfigError(
            f"rollout: a KV cache of {kv_memory} bytes is too small: a prompt and its response take at least "
            f"{2 * size} bytes with this model"
        )
    return KVCache(kv_memory // size, *shape, packed.device, options.compiled, tokens)


def _max_length(packed: PackedModel, wanted: int | None) -> int:
    limits = [limit for limit in (wanted, packed.max_positions, original_length(packed.config)) if limit is not None]
    if not limits:
        raise ConfigError("rollout: the model states no longest position: set max_length")
    if min(limits) < 2:
        raise ConfigError(f"rollout: max_length must be at least 2, got {min(limits)}")
    return min(limits)
