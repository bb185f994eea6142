"""What each step of generation computes: `Scheduler.schedule` makes a `ScheduledBatch`, `ModelRunner.run` computes it.

A step computes the last token of every running response, and a chunk of the prompts that are not in the cache yet. From
the final state of its last token a response's next one is drawn; its first one from the last state of its prompt.

**Tokens in flight.** Where the engine looks ahead, a step is scheduled before the host has read the tokens that the
step before drew. These are in flight: `Response.in_flight` counts them, at most one a response when a step is
scheduled. The batch has 0 in the place of such a token's id, and in `in_flight` its row of that draw, by which the
device finds it.

**Blocks.** A response takes blocks of the cache when it is admitted, and one more when its next token needs it. They
are freed when it leaves: it has ended, which is seen when a token is read; it is aborted; or it is put back, because
the cache is full (preemption) or its contents no longer hold. The blocks of a prompt are freed with the last response
to it. A step launched ahead of the end of a response still writes a token of it to blocks that are free by then; the
response that gets them next writes in a later step, so after it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from verl.rollout.embedded.kv_cache import BLOCK, KVCache
from verl.rollout.embedded.response import Response


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
class PromptState:
    """A prompt with running responses, which share its blocks.

    Attributes:
        computed: its first tokens, whose keys and values are in the cache after the steps scheduled so far.
        hidden: `[d]`, the final state of its last token, once that is computed.
    """

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    hidden: Tensor | None = None
    running: list[ResponseState] = field(default_factory=list)


class ResponseState:
    """A response, and what the scheduler knows of it.

    Attributes:
        prompt: None while it waits.
        tail: tokens of the prompt after its last full block; they are copied into the response's first block.
        blocks: its own, of `block` tokens.
        computed: its first tokens, whose keys and values are in the cache after the steps scheduled so far.
        row: its row in the last draw.
    """

    def __init__(self, response: Response, block: int) -> None:
        self.response = response
        self.prompt_key = tuple(response.prompt)
        self.prompt: PromptState | None = None
        self.block = block
        self.tail = len(response.prompt) % block
        self.blocks: list[int] = []
        self.computed = 0
        self.row = 0

    def chunk(self, most: int) -> tuple[list[int], int]:
        """The next tokens to compute, at most `most`; and the response's row of the last draw if the last of them is in
        flight, else -1."""
        response = self.response
        tokens = response.tokens[self.computed : self.computed + most]
        if response.in_flight and len(tokens) < most:
            return [*tokens, 0], self.row
        return tokens, -1

    @property
    def needed(self) -> int:
        """Blocks for its tokens and the next one."""
        tokens = min(self.response.drawn + 1, self.response.max_new_tokens)
        return -(-(self.tail + tokens) // self.block)


class ScheduledBatch:
    """What a step computes: the new tokens of some sequences, one sequence after the other, and who samples then.

    Attributes:
        tokens, positions: of each token.
        in_flight: of each token its row of the last draw, where the host has not read it yet; else -1.
        slots: where each token's keys and values go: block times tokens of a block plus row.
        ends: of each sequence's tokens.
        used: tokens of each sequence that are in the cache then, the new ones included.
        blocks: of each sequence, up to its last token.
        shared: how many of them may be shared with neighbouring sequences: those of a prompt, its responses' parent.
        copies: blocks to copy first, from and to.
        completed: prompts whose last token is computed here, with its index in `tokens`.
        samples: responses to draw a token for, with the index of the token whose state it is drawn from; -1: it is the
            prompt's last one, of this step or of one before.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.in_flight: list[int] = []
        self.slots: list[int] = []
        self.ends: list[int] = []
        self.used: list[int] = []
        self.blocks: list[list[int]] = []
        self.shared: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.completed: list[tuple[PromptState, int]] = []
        self.samples: list[tuple[ResponseState, int]] = []

    def add(self, tokens: Sequence[int], start: int, blocks: Sequence[int], shared: int, row: int = -1) -> int:
        """Add new tokens of a sequence, at positions `start, start + 1, ...`. Returns the index of the last one.

        Args:
            blocks: the sequence's blocks, up to these tokens at least.
            shared: how many of the first blocks may be shared with neighbouring sequences. The result of a sequence
                depends on this number, but not on whether others do share them.
            row: of the last draw, where the last of the tokens is in flight; else -1.
        """
        size, used = self.block, start + len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(start, used))
        self.in_flight.extend([-1] * (len(tokens) - 1) + [row])
        self.slots.extend(blocks[position // size] * size + position % size for position in range(start, used))
        self.ends.append(len(self.tokens))
        self.used.append(used)
        self.blocks.append(list(blocks[: -(-used // size)]))
        self.shared.append(min(shared, len(self.blocks[-1])))
        return len(self.tokens) - 1

    @property
    def is_decode(self) -> bool:
        """Whether it is one token of each of some responses, and each of them draws the next."""
        return bool(self.samples) and len(self.tokens) == len(self.samples) == len(self.ends) and not self.completed

    def to_json(self) -> bytes:
        """What is computed, for other ranks, which do not know for whom."""
        return json.dumps([getattr(self, name) for name in _COMPUTED]).encode()

    @classmethod
    def from_json(cls, text: bytes, block: int) -> ScheduledBatch:
        batch = cls(block)
        vars(batch).update(zip(_COMPUTED, json.loads(text), strict=True))
        return batch

    def split(self, size: int) -> list[ScheduledBatch]:
        """The same tokens as batches of at most `size`, to be computed in this order."""
        parts: list[ScheduledBatch] = []
        begin = 0
        for end, used, blocks, shared in zip(self.ends, self.used, self.blocks, self.shared, strict=True):
            while begin < end:
                if not parts or len(parts[-1].tokens) == size:
                    parts.append(ScheduledBatch(self.block))
                stop = min(end, begin + size - len(parts[-1].tokens))
                parts[-1].add(self.tokens[begin:stop], used - (end - begin), blocks, shared, self.in_flight[stop - 1])
                begin = stop
        return parts


_COMPUTED = ("tokens", "positions", "in_flight", "slots", "ends", "used", "blocks", "shared", "copies")


class Scheduler:
    """Continuous batching: decides which responses run, and what of them and of their prompts a step computes.

    Responses with equal prompts share one computation of it and one copy of its keys and values; prompts share those of
    a common prefix. When the cache is full, the newest response is put back (preempted) and recomputed later.

    Args:
        max_batch: responses that run at a time.
        step_tokens: prompt tokens computed in one step, besides one token of each running response.

    Attributes:
        waiting: in the order of arrival.
        running: in the order of admission.
        prompts: of the running responses, by their tokens.
    """

    def __init__(self, cache: KVCache, *, max_batch: int, step_tokens: int) -> None:
        self.cache = cache
        self.max_batch = max_batch
        self.step_tokens = step_tokens
        self.waiting: deque[ResponseState] = deque()
        self.running: list[ResponseState] = []
        self.prompts: dict[tuple[int, ...], PromptState] = {}

    def schedule(self, stats: EngineStats) -> ScheduledBatch:
        """The next step. Blocks and tokens count as filled and computed from here on."""
        self._admit()
        self._make_room(stats)
        batch = ScheduledBatch(self.cache.block)
        self._plan_prompts(batch, stats)
        self._plan_responses(batch, stats)
        return batch

    def end(self, state: ResponseState) -> None:
        """Forget a response that has ended, and free its blocks."""
        if state.prompt is None:
            self.waiting.remove(state)
        else:
            self._leave(state)

    def put_all_back(self) -> None:
        """Let all running responses wait again, in the order in which they run; tokens in flight are forgotten, and
        drawn again."""
        for state in reversed(self.running.copy()):
            state.response.in_flight = 0
            self._put_back(state)

    def _admit(self) -> None:
        """Start waiting responses while the batch and the cache have room."""
        while self.waiting and len(self.running) < self.max_batch:
            state = self.waiting[0]
            prompt = self.prompts.get(state.prompt_key)
            prompt_blocks = None if prompt else self.cache.take_prompt(state.prompt_key)
            if prompt is None and prompt_blocks is None:
                return
            blocks = self.cache.take(state.needed)
            if blocks is None:
                self.cache.drop(prompt_blocks or [])
                return
            if prompt is None:
                assert prompt_blocks is not None
                prompt = self.prompts[state.prompt_key] = PromptState(state.response.prompt, prompt_blocks)
            self.waiting.popleft()
            state.prompt, state.blocks, state.computed = prompt, blocks, 0
            prompt.running.append(state)
            self.running.append(state)

    def _make_room(self, stats: EngineStats) -> None:
        """Take a block for each response whose next token needs one; if none is left, preempt the newest response."""
        for state in list(self.running):
            # A response that is preempted here, maybe this one, has no prompt any more.
            while state.prompt is not None and state.needed > len(state.blocks):
                block = self.cache.take(1)
                if block is not None:
                    state.blocks += block
                else:
                    stats.preemptions += 1
                    self._put_back(self.running[-1])

    def _plan_prompts(self, batch: ScheduledBatch, stats: EngineStats) -> None:
        """Plan chunks of prompts in their order of arrival."""
        budget, size = self.step_tokens, self.cache.block
        for prompt in self.prompts.values():
            if prompt.hidden is not None:
                continue
            if budget == 0:
                break
            self._skip_filled(prompt)
            start, end = prompt.computed, min(prompt.computed + budget, len(prompt.tokens))
            index = batch.add(prompt.tokens[start:end], start, prompt.blocks, len(prompt.blocks))
            budget -= end - start
            # From the plan on, not from when they are computed: another prompt of this very step may then skip them.
            # All keys and values of a layer are written before any token attends to them.
            for block in prompt.blocks[start // size : end // size]:
                self.cache.filled[block] = True
            prompt.computed = end
            if end == len(prompt.tokens):
                batch.completed.append((prompt, index))
        stats.prompt_tokens += self.step_tokens - budget

    def _skip_filled(self, prompt: PromptState) -> None:
        """Count blocks as computed that another prompt has filled, or fills in this step; never the last token, whose
        state is needed."""
        size = self.cache.block
        while prompt.computed % size == 0 and prompt.computed + size < len(prompt.tokens):
            if not self.cache.filled[prompt.blocks[prompt.computed // size]]:
                break
            prompt.computed += size

    def _plan_responses(self, batch: ScheduledBatch, stats: EngineStats) -> None:
        """Plan the tokens of responses whose prompts are computed: the last one, or after a preemption a chunk."""
        budget = max(0, self.step_tokens - len(batch.tokens))
        for prompt in self.prompts.values():
            if prompt.computed < len(prompt.tokens):
                continue
            for state in prompt.running:
                if state.response.is_full:  # its last token is on its way
                    continue
                chunk, row = state.chunk(max(1, budget))
                index = -1
                if chunk and prompt.hidden is None:  # computed in this step: there is nothing to copy yet
                    continue
                if chunk:
                    # The block that the prompt fills in part goes on with the response: each has a copy of its own.
                    if state.computed == 0 and state.tail:
                        batch.copies.append((prompt.blocks[-1], state.blocks[0]))
                    shared = len(prompt.tokens) // self.cache.block
                    start = len(prompt.tokens) + state.computed
                    index = batch.add(chunk, start, prompt.blocks[:shared] + state.blocks, shared, row)
                    state.computed += len(chunk)
                    budget -= len(chunk) - 1
                    stats.recomputed_tokens += len(chunk) - 1
                if state.computed == state.response.drawn:
                    state.row = len(batch.samples)
                    batch.samples.append((state, index))

    def _leave(self, state: ResponseState) -> None:
        """Remove a running response and free its blocks; those of its prompt too, if it was the last one."""
        prompt = state.prompt
        assert prompt is not None
        self.running.remove(state)
        prompt.running.remove(state)
        self.cache.drop(state.blocks)
        state.prompt, state.blocks, state.computed = None, [], 0
        if not prompt.running:
            del self.prompts[state.prompt_key]
            self.cache.drop(prompt.blocks)

    def _put_back(self, state: ResponseState) -> None:
        self._leave(state)
        self.waiting.appendleft(state)
