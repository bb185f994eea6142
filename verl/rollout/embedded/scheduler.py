"""What each step of generation computes: `Scheduler.schedule` makes a `ScheduledBatch`, `ModelRunner.run` computes it.

A step computes the last token of every running response, and a chunk of the prompts that are not in the cache yet. A
response's first token is drawn from the hidden state of its prompt's last token, each later one from that of the token
before it.

**Tokens in flight** are drawn and not yet read by the host. `PendingTokens` counts them in `Response.in_flight`: up
when they are drawn, down when the host reads them. Where the engine looks ahead, a step is scheduled before the tokens
of the step before are read, so one token a response is in flight then. Its id is not known: `ScheduledBatch.tokens` has
0 in its place, and `draw_rows` its row in `ModelRunner.last_draw`, where the device finds it. A response that is
preempted keeps such a token (it is read later); `put_all_back` forgets it, and it is drawn again.

**Blocks** of the cache are taken in `_admit`, and one more in `_make_room` when a response's next token needs it. They
are freed in `_leave`: a response has ended or was aborted (`end`), is preempted because the cache is full
(`_make_room`), or is recomputed because what the cache holds is out of date (`put_all_back`). A prompt's blocks are
freed with its last running response. Looking ahead, a step may have been launched before the host saw that a response
ended, and writes one more token of it to blocks that are free by then. That is harmless: the response or prompt that
gets them next writes in a later step, and reads nothing there that it has not written.

**Turns of an episode** (`Request.is_turn`): the next prompt begins with this prompt and its response, so what the cache
holds of both is kept, to the last token. A later prompt shares the full blocks of it, and copies the beginning of one
more. Of a response only its last token may not have been computed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from verl.rollout.embedded.kv_cache import BLOCK, Digest, KVCache, prefix_digests
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
        computed: number of its leading tokens whose keys and values are in the cache after the steps scheduled so far.
        hidden: `[d]`, the final state of its last token, once that is computed.
        digests: `prefix_digests` of a turn's prompt, which is kept for later ones; else empty.
    """

    tokens: list[int]
    blocks: list[int]
    digests: list[Digest]
    computed: int = 0
    hidden: Tensor | None = None
    running: list[ResponseState] = field(default_factory=list)


class ResponseState:
    """A response, and what the scheduler knows of it.

    Attributes:
        prompt: None while it waits.
        tail: tokens of the prompt after its last full block; they are copied into the response's first block.
        blocks: its own, of `block` tokens.
        computed: number of its leading tokens whose keys and values are in the cache after the steps scheduled so far;
            a token in flight counts.
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
        """`(tokens, draw_row)`: its next tokens to compute, at most `most`; if the last of them is in flight, its row
        in the last draw, else -1."""
        response = self.response
        tokens = response.tokens[self.computed : self.computed + most]
        if response.in_flight and len(tokens) < most:  # room is left behind all known tokens: that in flight is next
            return [*tokens, 0], self.row
        return tokens, -1

    @property
    def needed(self) -> int:
        """Blocks for its tokens, those in flight too, and the next one."""
        tokens = min(self.response.drawn + 1, self.response.max_new_tokens)
        return -(-(self.tail + tokens) // self.block)


class ScheduledBatch:
    """What a step computes: the new tokens of some sequences, one sequence after the other, and who samples then.

    Attributes:
        tokens, positions: of each token.
        draw_rows: of each token in flight its row in the last draw; -1 for the others.
        slots: where each token's keys and values go: block times tokens of a block plus row.
        ends: of each sequence's tokens.
        used: length of each sequence after this step, the new tokens included.
        blocks: of each sequence, up to its last token.
        shared: how many of a sequence's leading blocks neighbouring sequences may share: those that its prompt fills.
        copies: blocks to copy first, from and to.
        completed: prompts whose last token is computed here, with its index in `tokens`.
        samples: responses to draw a token for, with the index in `tokens` of the token whose hidden state it is drawn
            from; -1: the state is `PromptState.hidden`, set in this step or in one before.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.draw_rows: list[int] = []
        self.slots: list[int] = []
        self.ends: list[int] = []
        self.used: list[int] = []
        self.blocks: list[list[int]] = []
        self.shared: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.completed: list[tuple[PromptState, int]] = []
        self.samples: list[tuple[ResponseState, int]] = []

    def add(self, tokens: Sequence[int], start: int, blocks: Sequence[int], shared: int, draw_row: int = -1) -> int:
        """Add new tokens of a sequence, at positions `start, start + 1, ...`. Returns the index of the last one.

        Args:
            blocks: the sequence's blocks, up to these tokens at least.
            shared: how many of the first blocks may be shared with neighbouring sequences. The result of a sequence
                depends on this number, but not on whether others do share them.
            draw_row: if the last of the tokens is in flight, its row in the last draw; else -1.
        """
        size, used = self.block, start + len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(start, used))
        self.draw_rows.extend([-1] * (len(tokens) - 1) + [draw_row])
        self.slots.extend(blocks[position // size] * size + position % size for position in range(start, used))
        self.ends.append(len(self.tokens))
        self.used.append(used)
        self.blocks.append(list(blocks[: -(-used // size)]))
        self.shared.append(min(shared, len(self.blocks[-1])))
        return len(self.tokens) - 1

    @property
    def is_decode(self) -> bool:
        """Whether each token is the last one of a response, which draws its next one from it."""
        return bool(self.samples) and [index for _, index in self.samples] == [*range(len(self.tokens))]

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
                parts[-1].add(self.tokens[begin:stop], used - (end - begin), blocks, shared, self.draw_rows[stop - 1])
                begin = stop
        return parts


_COMPUTED = ("tokens", "positions", "draw_rows", "slots", "ends", "used", "blocks", "shared", "copies")


class Scheduler:
    """Continuous batching: decides which responses run, and what of them and of their prompts a step computes.

    Responses with equal prompts share one computation of it and one copy of its keys and values; prompts share those of
    a common prefix. When the cache is full, the newest response is put back (preempted) and recomputed later.

    Args:
        max_batch: responses that run at a time.
        step_tokens: prompt tokens computed in one step, besides one token of each running response.
        keep_responses: whether prompts may begin with what was computed for a response, which differs by rounding from
            what is computed for a prompt.

    Attributes:
        waiting: in the order of arrival.
        running: in the order of admission.
        prompts: of the running responses, by their tokens.
    """

    def __init__(self, cache: KVCache, *, max_batch: int, step_tokens: int, keep_responses: bool = True) -> None:
        self.cache = cache
        self.keep_responses = keep_responses
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
        """Forget a response that has ended or was aborted, and free its blocks."""
        if state.prompt is None:
            self.waiting.remove(state)
        else:
            self._keep(state)
            self._leave(state)

    def put_all_back(self) -> None:
        """Let all running responses wait again, in the order in which they run; tokens in flight are forgotten, those
        of preempted responses too, and drawn again."""
        for state in reversed(self.running.copy()):
            self._put_back(state)
        for state in self.waiting:
            state.response.in_flight = 0

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
                tokens = state.response.prompt
                digests = prefix_digests(tokens, self.cache.block) if state.response.is_turn else []
                prompt = self.prompts[state.prompt_key] = PromptState(tokens, prompt_blocks, digests)
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
        kept: list[tuple[PromptState, int, int]] = []
        for prompt in self.prompts.values():
            if prompt.hidden is not None:
                continue
            if budget == 0:
                break
            self._skip_filled(prompt)
            if prompt.digests:
                if self._is_begun(prompt, kept):
                    continue
                self._copy_beginning(prompt, batch)
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
            if prompt.digests:
                kept.append((prompt, start, end))
        for prompt, start, end in kept:  # for later steps: copies are made before a step's tokens are computed
            self.cache.keep(prompt.tokens, prompt.blocks, prompt.digests, start, end)
        stats.prompt_tokens += self.step_tokens - budget

    def _skip_filled(self, prompt: PromptState) -> None:
        """Count blocks as computed that another prompt has filled, or fills in this step; never the last token, whose
        state is needed."""
        size = self.cache.block
        while prompt.computed % size == 0 and prompt.computed + size < len(prompt.tokens):
            if not self.cache.filled[prompt.blocks[prompt.computed // size]]:
                break
            prompt.computed += size

    def _is_begun(self, prompt: PromptState, planned: Sequence[tuple[PromptState, int, int]]) -> bool:
        """Whether another prompt's chunk in this step has the next token of this one too, behind the same tokens: it
        waits then, and copies it in the next step."""
        position, size = prompt.computed, self.cache.block
        full = position // size
        return position + 1 < len(prompt.tokens) and any(
            start <= position < end
            and other.blocks[full - 1 : full] == prompt.blocks[full - 1 : full]
            and other.tokens[full * size : position + 1] == prompt.tokens[full * size : position + 1]
            for other, start, end in planned
        )

    def _copy_beginning(self, prompt: PromptState, batch: ScheduledBatch) -> None:
        """Count tokens as computed that begin a block which is kept, and copy them; never the prompt's last one."""
        start, size = prompt.computed, self.cache.block
        if start % size == 0:
            rest = prompt.tokens[start : min(start + size, len(prompt.tokens) - 1)]
            source, count = self.cache.longest_rows(prompt.digests[start // size], rest)
            if count:
                batch.copies.append((source, prompt.blocks[start // size]))
                prompt.computed += count

    def _plan_responses(self, batch: ScheduledBatch, stats: EngineStats) -> None:
        """Plan the tokens of responses whose prompts are computed: the last token, or after a preemption a chunk of
        what is computed again."""
        budget = max(0, self.step_tokens - len(batch.tokens))
        for prompt in self.prompts.values():
            if prompt.computed < len(prompt.tokens):
                continue
            for state in prompt.running:
                if state.response.drawn >= state.response.max_new_tokens:  # its last token is in flight
                    continue
                chunk, draw_row = state.chunk(max(1, budget))
                index = -1
                if chunk and prompt.hidden is None:
                    # Preempted with its prompt, which is filled in this very step: there is no block to copy from yet.
                    continue
                if chunk:
                    # The block that the prompt fills in part goes on with the response: each has a copy of its own.
                    if state.computed == 0 and state.tail:
                        batch.copies.append((prompt.blocks[-1], state.blocks[0]))
                    shared = len(prompt.tokens) // self.cache.block
                    start = len(prompt.tokens) + state.computed
                    index = batch.add(chunk, start, prompt.blocks[:shared] + state.blocks, shared, draw_row)
                    state.computed += len(chunk)
                    budget -= len(chunk) - 1
                    stats.recomputed_tokens += len(chunk) - 1
                if state.computed == state.response.drawn:
                    state.row = len(batch.samples)
                    batch.samples.append((state, index))

    def _keep(self, state: ResponseState) -> None:
        """Keep what is computed of a response that has ended, for prompts that begin with it."""
        prompt, response, size = state.prompt, state.response, self.cache.block
        if prompt is not None and prompt.digests and state.computed and self.keep_responses:
            tokens, full = prompt.tokens + response.tokens, len(prompt.tokens) // size
            end = len(prompt.tokens) + min(state.computed, len(response.tokens))  # one in flight is not known
            blocks = prompt.blocks[:full] + state.blocks
            self.cache.keep(tokens, blocks, prefix_digests(tokens, size), full * size, end)

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
