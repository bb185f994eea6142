"""The model's side of a step: `ModelRunner.run` computes a `ScheduledBatch` and samples the next tokens.

It returns `PendingTokens`, which are in flight until the engine reads them (`PendingTokens.take`): at once; or, where
the engine looks ahead, after it has launched the next step, which finds them in `last_sampled` on the device.

With tensor parallelism ranks compute one forward together, each with its heads and its part of the KV cache. The first
is the driver: it has the requests, schedules, samples, and sends commands to the workers, which run `worker_loop`. So
admission, preemption, aborts, episodes and guards are decided once, and nothing has to be equal by luck. If the driver
fails in a forward, it raises at once and sends no more commands: the workers wait in that forward until the job ends
them.

Shapes: T tokens of a step, N rows that are sampled for, d hidden size, V vocabulary, S rows with padding, B blocks of
the longest sequence that there can be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from verl._host import device
from verl._host.device import to_device
from verl.attention import flash
from verl.errors import RolloutError
from verl.kernels.compiled import kernels
from verl.models.packed import PackedModel, evaluating, head_of
from verl.rollout.embedded.attention import BatchTensors, PagedAttention, copy_blocks
from verl.rollout.embedded.kv_cache import KVCache, blocks_for
from verl.rollout.embedded.response import PendingTokens, Response, next_sampling, sample_next
from verl.rollout.embedded.sampler import SamplingFlags, sample
from verl.rollout.embedded.scheduler import EngineOptions, ScheduledBatch

# Matrix products compute blocks of about four rows, and the remaining rows in another order of summation. Padding the
# rows of a step to a multiple of 8 makes a token's result independent of how many others there are. The step grows with
# the number of rows, because a library keeps code for every shape that it has met (oneDNN: half a megabyte).
_ROWS, _SIZES = 8, 16
#: With `batch_invariant` every product has this many rows.
FIXED_ROWS = 64
# The driver's commands: end the worker loop, compute the hidden states of a batch, compute the logits of some states.
_END, _HIDDEN, _LOGITS = range(3)
# Rows of `DecodeStep.numbers`, before those of the block table; the last five are fp64.
_TOKEN, _POSITION, _IN_FLIGHT, _SLOT, _USED, _UNIFORM, _TABLE = 0, 1, 2, 3, 4, 5, 10


class ModelRunner:
    """Runs a model over the KV cache.

    Args:
        max_length: of prompt and response together.

    Attributes:
        is_driver: whether this rank schedules and samples.
        last_sampled: `[max_batch]` or more, int64: the tokens sampled last, by row; None without looking ahead.
        forward: of the model's modules as they are, see `PackedModel.choose_forward`.
        decode_steps: by rows with padding and how they are sampled, decode steps in fixed buffers, which a CUDA graph
            needs: where it looks ahead without our kernels.
    """

    def __init__(self, packed: PackedModel, cache: KVCache, options: EngineOptions, max_length: int) -> None:
        self.packed, self.cache, self.group = packed, cache, packed.tensor_group
        self._rows = FIXED_ROWS if options.batch_invariant else None
        self._driver = 0 if self.group is None else dist.get_process_group_ranks(self.group)[0]
        self.is_driver = self.group is None or dist.get_rank() == self._driver
        #: Whether the workers are computing a command: they take no other one then.
        self._is_computing = False
        self._max_batch, self.max_length = options.max_batch, max_length
        self.last_sampled: Tensor | None = None
        if options.look_ahead:
            rows = max(options.max_batch, self.padded(options.max_batch))
            self.last_sampled = torch.zeros(rows, dtype=torch.int64, device=cache.device)
        self._in_fixed_buffers = bool(options.look_ahead) and cache.kernels is None and not options.batch_invariant
        self.decode_steps: dict[tuple[int, SamplingFlags | None], DecodeStep] = {}
        self._plain_head = cache.kernels is not None and self.group is None and _head_is_plain(packed)
        dtype = packed.dtype if self._plain_head else torch.promote_types(packed.dtype, torch.float32)
        self._kernels = kernels(dtype, cache.device) if options.compiled else None
        self._logit_space = torch.empty(0, dtype=packed.dtype)
        self._no_states = torch.empty(0, packed.hidden_size, dtype=packed.dtype, device=cache.device)
        self.forward = packed.choose_forward()

    @torch.no_grad()
    def run(self, batch: ScheduledBatch, policy_version: int) -> list[PendingTokens]:
        """Compute the tokens of the batch, and sample one for each of its `samples`.

        In a decode step the batch has the last token of each response: its keys and values are written to its slot, and
        the next token is sampled from the logits of its hidden state.
        """
        with ExitStack() as stack:
            if self.group is not None and (batch.tokens or batch.copies):
                text = bytearray(json.dumps(vars(batch) | {"completed": [], "samples": []}).encode())
                stack.enter_context(self._command(_HIDDEN, len(text), torch.frombuffer(text, dtype=torch.uint8)))
            if self.packed.model.training:
                stack.enter_context(evaluating(self.packed.model))
            copy_blocks(self.cache, batch.copies)
            is_decode = bool(batch.samples) and [i for _, i in batch.samples] == [*range(len(batch.tokens))]
            if is_decode and self._in_fixed_buffers and self.packed.ready is None:
                return [self._decode(batch, policy_version)]
            hidden = self._forward(batch)
        for prompt, index in batch.completed:
            prompt.hidden = hidden[index].clone()
        return self._sample(batch.samples, hidden, policy_version) if batch.samples else []

    def padded(self, rows: int) -> int:
        """The padded batch size of a product of `rows` rows."""
        if self._rows is not None:
            return self._rows
        step = max(_ROWS, (1 << (rows - 1).bit_length()) // _SIZES)
        return -(-rows // step) * step

    def end(self) -> None:
        """Free what is kept between steps, and end the workers' loops."""
        self._logit_space = torch.empty(0, dtype=self.packed.dtype)
        self.decode_steps.clear()
        if self.group is not None and self.is_driver and not self._is_computing:
            self._broadcast(torch.tensor([_END, 0]))
        self._is_computing = False

    @torch.no_grad()
    def worker_loop(self) -> None:
        """Compute what the driver commands, until it ends."""
        while True:
            command, count = self._broadcast(torch.empty(2, dtype=torch.int64)).tolist()
            if command == _END:
                return
            if command == _LOGITS:
                self.packed.logits(self._broadcast(self._no_states.new_empty(count, self._no_states.shape[1])))
                continue
            text = self._broadcast(torch.empty(count, dtype=torch.uint8))
            batch = ScheduledBatch(**json.loads(bytes(text.tolist())))
            copy_blocks(self.cache, batch.copies)
            with evaluating(self.packed.model):
                self._forward(batch)

    def _broadcast(self, content: Tensor) -> Tensor:
        dist.broadcast(content, self._driver, group=self.group)
        return content

    @contextmanager
    def _command(self, command: int, count: int, content: Tensor) -> Iterator[None]:
        """Inside, all ranks compute the command. Where that fails, they take no other one until the engine sleeps."""
        if self._is_computing:
            raise RolloutError("the ranks that generate together are no longer in step: a forward of theirs failed")
        self._is_computing = True
        self._broadcast(torch.tensor([command, count]))
        self._broadcast(content)
        yield
        self._is_computing = False

    def _forward(self, batch: ScheduledBatch) -> Tensor:
        """Final hidden states `[T, d]` of the batch's tokens."""
        if not batch.tokens:
            return self._no_states
        states = []
        for part in [batch] if self._rows is None else batch.split(self._rows):
            count = len(part.tokens)
            states.append(self.hidden(BatchTensors.of(part, self.cache.device, self.padded(count)))[:count])
        return states[0] if len(states) == 1 else torch.cat(states)

    def hidden(self, tensors: BatchTensors) -> Tensor:
        """Final hidden states `[T', d]`; tokens in flight are read from `last_sampled`."""
        tokens = tensors.tokens
        if self.last_sampled is not None:
            sampled = self.last_sampled.index_select(0, tensors.sampled_rows.clamp(min=0))
            tokens = torch.where(tensors.sampled_rows < 0, tokens, sampled)
        # While weights are on their way, layers wait for them in the model's own code alone.
        forward = self.forward if self.packed.ready is None else self.packed.hidden
        return forward(tokens, tensors.positions, PagedAttention(self.cache, tensors, self._rows))

    def _decode(self, batch: ScheduledBatch, policy_version: int) -> PendingTokens:
        """Sample the next token of each response, given its last one, by the same operations in fixed buffers."""
        responses, rows = [response for response, _ in batch.samples], self.padded(len(batch.samples))
        flags, table = next_sampling(responses, rows)
        # Edits are the caller's code, so what they change is sampled outside of the recorded step; so is what keeps its
        # logits.
        outside = any(r.is_edited or r.request.top_log_probs for r in responses)
        key = rows, None if outside else flags
        step = self.decode_steps.get(key) or self.decode_steps.setdefault(key, DecodeStep(self, *key))
        step.run(batch, table)
        if outside:
            pending = sample_next(responses, step.logits, policy_version)
        else:
            pending = PendingTokens(responses, step.tokens, step.log_probs, policy_version, step.logits.dtype)
        assert self.last_sampled is not None
        self.last_sampled[:rows].copy_(pending.tokens)
        return pending

    def _sample(self, samples: list[tuple[Response, int]], hidden: Tensor, policy_version: int) -> list[PendingTokens]:
        """Sample a token for each of `samples`, given the states `[T, d]` of the step."""
        # A first token is sampled from the prompt's last state, cached since it was computed: this may be steps ago,
        # for the other samples of the prompt. These states are stacked after those of this step's tokens.
        prompts = [r.prompt_state for r, index in samples if index < 0]
        first = [prompt.hidden for prompt in prompts if prompt is not None and prompt.hidden is not None]
        states = torch.cat([hidden, torch.stack(first)]) if first else hidden
        fresh = iter(range(len(hidden), len(states)))
        rows = [next(fresh) if index < 0 else index for _, index in samples]
        size = self._rows or len(rows)
        pending = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            # Padded by copies of a row that is there, so that no row's numbers depend on how many there are; what is
            # sampled for a copy has no response, and is dropped.
            some += some[:1] * (self.padded(len(some)) - len(some))
            logits = self.logits(states.index_select(0, to_device(torch.tensor(some), states.device)))
            responses = [response for response, _ in samples[start : start + size]]
            pending.append(sample_next(responses, logits, policy_version, self._kernels))
        if self.last_sampled is not None:  # where the next step, scheduled before these are read, finds them
            tokens = torch.cat([each.tokens[: len(each.responses)] for each in pending])
            self.last_sampled[: len(tokens)].copy_(tokens)
        return pending

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[N, V]` of states `[N, d]`; in the model's dtype, without an fp32 copy, where the head is plain and
        kernels sample."""
        if self.group is not None:
            with self._command(_LOGITS, len(states), states):
                return self.packed.logits(states)
        if not self._plain_head:
            return self.packed.logits(states)
        weight, bias = head_of(self.packed.model)
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            # torch would take MKL, which copies the whole head into blocks for the few rows of a decode step; oneDNN,
            # as in bf16, reads it where it lies: at 32 rows in half of the time.
            logits: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
            return logits
        if len(self._logit_space) < len(states):
            self._logit_space = states.new_empty(self.padded(self._max_batch), len(weight))
        out = self._logit_space[: len(states)]
        return torch.mm(states, weight.t(), out=out) if bias is None else torch.addmm(bias, states, weight.t(), out=out)


@torch.no_grad()
def _head_is_plain(packed: PackedModel) -> bool:
    """Whether logits are the head's linear map and nothing else (no scale, no soft cap)."""
    states = torch.linspace(-3, 3, 2 * packed.hidden_size, dtype=packed.dtype).view(2, -1)
    plain = torch.nn.functional.linear(states, *head_of(packed.model))
    return torch.equal(packed.logits(states), plain.to(torch.promote_types(plain.dtype, torch.float32)))


class DecodeStep:
    """A decode step of one padded batch size and one way of sampling, in memory that stays where it is; `flags` None:
    it ends with the logits. It is dropped when weights or KV cache move in memory.

    Its numbers (tokens, positions, block tables, how each row is sampled) go to the device as one copy. A token in
    flight is taken from the step before, on the device. Where the kernels allow it, the forward and the sampling are
    recorded once as a CUDA graph and replayed.

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
        self.numbers.copy_(to_device(torch.from_numpy(numbers), self.numbers.device))
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
