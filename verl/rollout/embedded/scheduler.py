"""The schedule of generation: `Scheduler.schedule` makes the `ScheduledBatch` of a step, `ModelRunner.run` computes it.

        EmbeddedEngine.add -------> waiting  <-----------------------.
                                       | _admit: blocks are taken    | _make_room: the cache is full;
                                       v                             | preempt_all: the cache is out of date
          .------------------------>running -------------------------'
          |                            |
          |                            | _make_room: a block for the next token
          |                            | _plan_prefill: a chunk of each prompt that is not in the cache yet
          |                            | _plan_decode: the last token of each response
          |                            v
          |                      ScheduledBatch
          |                            | ModelRunner.run: forward, `sample_next`: tokens in flight
          |                            v
          '--- unfinished --- PendingTokens.take --- ended --> end: blocks are freed, or stay as a cached prefix

A response's first token is sampled from the hidden state of its prompt's last token, each later one from the hidden
state of the token before it. Weights change only between steps, after `preempt_all` (`EmbeddedEngine.load_shards`;
optimizer steps on tensors that the engine shares, while it sleeps).

**Tokens in flight** are sampled and not yet read by the host. `PendingTokens` counts them in `Response.in_flight`: up
when they are sampled, down when the host reads them. Where the engine looks ahead, a step is scheduled before the
tokens of the step before are read, so one token a response is in flight then. Its id is not known: it is 0 in
`ScheduledBatch.tokens`, and `sampled_rows` says where in `ModelRunner.last_sampled` the device finds it. A response
that is preempted keeps such a token (it is read later); `preempt_all` forgets it, and it is sampled again.

**Blocks** of the cache are taken in `_admit`, and one more in `_make_room` when a response's next token needs it. They
are freed in `_leave`: a response has ended or was aborted (`end`), or is preempted. A prompt's blocks are freed with
its last running response. Looking ahead, a step may have been launched before the host saw that a response ended, and
writes one more token of it to blocks that are free by then. That is harmless: the response or prompt that gets them
next writes in a later step, and reads nothing there that it has not written.

**Turns of an episode** (`Request.is_turn`): the next prompt begins with this prompt and its response, so the cache
keeps both, to the last token (which may not have been computed). A later prompt shares the full blocks, and copies the
beginning of one more (the partial-block prefix cache).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl._base.checked import checked
from verl._base.record import Count
from verl.rollout.embedded.kv_cache import BLOCK, KVCache, prefix_digests
from verl.rollout.embedded.response import PromptState, Response


@checked
@dataclass(frozen=True)
class EngineOptions:
    """How the embedded engine runs.

    Attributes:
        max_batch: responses that run at a time.
        step_tokens: prompt tokens computed in one step, besides one token of each running response.
        batch_invariant: every forward has the same shape (64 tokens), so a response is bit for bit the same in any
            batch and after any preemption, at the price of speed; prompts do not share keys and values of responses,
            which differ by rounding from those of a prefill.
        compiled: on CPU use the compiled kernels where they can be built.
        look_ahead: launch a step before the tokens of the one before are read, decode steps from fixed buffers; None:
            on an accelerator. Ignored under tensor parallelism.

    Raises:
        ConfigError: a number is not positive.
    """

    max_batch: Count = 256
    step_tokens: Count = 2048
    batch_invariant: bool = False
    compiled: bool = True
    look_ahead: bool | None = None


@dataclass
class ScheduledBatch:
    """The work of a step: the new tokens of some sequences, one sequence after the other, and what to sample.

    Attributes:
        block: tokens of a block.
        tokens, positions: of each token.
        sampled_rows: of each token in flight its row in the last sampled tokens; -1 for the others.
        slots: where each token's keys and values go: block times tokens of a block plus row.
        ends: of each sequence's tokens.
        used: length of each sequence after this step, the new tokens included.
        blocks: of each sequence, up to its last token.
        shared: how many of a sequence's leading blocks neighbouring sequences may share: those that its prompt fills.
        copies: blocks to copy first, from and to.
        completed: prompts whose last token is computed here, with its index in `tokens`.
        samples: responses to sample a token for, with the index in `tokens` of the token whose hidden state it is
            sampled from; -1: the state is `PromptState.hidden`, set in this step or in one before.
    """

    block: int = BLOCK
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    completed: list[tuple[PromptState, int]] = field(default_factory=list)
    samples: list[tuple[Response, int]] = field(default_factory=list)

    def add(self, tokens: Sequence[int], start: int, blocks: Sequence[int], shared: int, sampled_row: int = -1) -> int:
        """Add new tokens of a sequence, at positions `start, start + 1, ...`. Returns the index of the last one.

        Args:
            blocks: the sequence's blocks, up to these tokens at least.
            shared: how many of the first blocks may be shared with neighbouring sequences. The result of a sequence
                depends on this number, but not on whether others do share them.
            sampled_row: if the last of the tokens is in flight, its row in the last sampled tokens; else -1.
        """
        size, used = self.block, start + len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(start, used))
        self.sampled_rows.extend([-1] * (len(tokens) - 1) + [sampled_row])
        self.slots.extend(blocks[position // size] * size + position % size for position in range(start, used))
        self.ends.append(len(self.tokens))
        self.used.append(used)
        self.blocks.append(list(blocks[: -(-used // size)]))
        self.shared.append(min(shared, len(self.blocks[-1])))
        return len(self.tokens) - 1

    def split(self, size: int) -> list[ScheduledBatch]:
        """The same tokens as batches of at most `size`, to be computed in this order."""
        parts: list[ScheduledBatch] = []
        begin = 0
        for end, used, blocks, shared in zip(self.ends, self.used, self.blocks, self.shared, strict=True):
            while begin < end:
                if not parts or len(parts[-1].tokens) == size:
                    parts.append(ScheduledBatch(self.block))
                stop = min(end, begin + size - len(parts[-1].tokens))
                row = self.sampled_rows[stop - 1]
                parts[-1].add(self.tokens[begin:stop], used - (end - begin), blocks, shared, row)
                begin = stop
        return parts


@dataclass(eq=False)
class Scheduler:
    """Continuous batching: decides which responses run, and what of them and of their prompts a step computes.

    Responses with equal prompts share one computation of it and one copy of its keys and values; a common prefix of
    different prompts is shared too. When the cache is full, the newest response is preempted, and recomputed later.

    Attributes:
        waiting: in the order of arrival.
        running: in the order of admission.
        prompts: of the running responses, by their tokens.
        steps, prompt_tokens, preemptions: counts since the engine was made.
    """

    cache: KVCache
    options: EngineOptions
    waiting: deque[Response] = field(default_factory=deque)
    running: list[Response] = field(default_factory=list)
    prompts: dict[tuple[int, ...], PromptState] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0

    def schedule(self) -> ScheduledBatch:
        """The next step. Blocks and tokens count as filled and computed from here on."""
        self._admit()
        self._make_room()
        batch = ScheduledBatch(self.cache.block)
        self._plan_prefill(batch)
        self._plan_decode(batch)
        self.steps += bool(batch.tokens)
        return batch

    def end(self, response: Response) -> None:
        """Forget a response that has ended or was aborted, and free its blocks."""
        prompt, size = response.prompt_state, self.cache.block
        if prompt is None:
            self.waiting.remove(response)
            return
        if prompt.digests and response.computed and not self.options.batch_invariant:  # for prompts that begin with it
            tokens, full = [*prompt.tokens, *response.tokens], len(prompt.tokens) // size
            end = len(prompt.tokens) + min(response.computed, len(response.tokens))  # one in flight is not known
            blocks = prompt.blocks[:full] + response.blocks
            self.cache.cache_prefix(tokens, blocks, prefix_digests(tokens, size), full * size, end)
        self._leave(response)

    def preempt_all(self) -> None:
        """Let all running responses wait again, in the order in which they run; tokens in flight are forgotten, for
        responses preempted earlier too, and sampled again."""
        while self.running:
            self.waiting.appendleft(self.running[-1])
            self._leave(self.running[-1])
        for response in self.waiting:
            response.in_flight = 0

    def _admit(self) -> None:
        """Start waiting responses while the batch and the cache have room."""
        while self.waiting and len(self.running) < self.options.max_batch:
            response = self.waiting[0]
            prompt = self.prompts.get(response.prompt_key)
            prompt_blocks = prompt.blocks if prompt else self.cache.take_prompt(response.prompt)
            if prompt_blocks is None:
                return
            blocks = self.cache.take(self._blocks_needed(response))
            if blocks is None:
                if prompt is None:
                    self.cache.drop(prompt_blocks)
                return
            if prompt is None:
                digests = prefix_digests(response.prompt, self.cache.block) if response.request.is_turn else []
                prompt = self.prompts[response.prompt_key] = PromptState(response.prompt, prompt_blocks, digests)
            self.waiting.popleft()
            response.prompt_state, response.blocks, response.computed = prompt, blocks, 0
            prompt.running.append(response)
            self.running.append(response)

    def _blocks_needed(self, response: Response) -> int:
        """Blocks for its tokens, those in flight too, and the next one. They begin with a copy of the prompt's last
        partial block."""
        size, tokens = self.cache.block, min(response.sampled + 1, response.max_new_tokens)
        return -(-(len(response.prompt) % size + tokens) // size)

    def _make_room(self) -> None:
        """Take a block for each response whose next token needs one; if none is left, preempt the newest response."""
        for response in list(self.running):
            # A response that is preempted here, maybe this one, has no prompt any more.
            while response.prompt_state is not None and self._blocks_needed(response) > len(response.blocks):
                block = self.cache.take(1)
                if block is not None:
                    response.blocks += block
                else:
                    self.preemptions += 1
                    self.waiting.appendleft(self.running[-1])
                    self._leave(self.running[-1])

    def _plan_prefill(self, batch: ScheduledBatch) -> None:
        """Prefill: a chunk of each prompt, in their order of arrival."""
        budget, size = self.options.step_tokens, self.cache.block
        turns: list[tuple[PromptState, int, int]] = []
        for prompt in self.prompts.values():
            if prompt.hidden is not None:
                continue
            if budget == 0:
                break
            if not self._skip_cached(prompt, turns, batch):
                continue
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
                turns.append((prompt, start, end))
        for prompt, start, end in turns:  # for later steps: copies are made before a step's tokens are computed
            self.cache.cache_prefix(prompt.tokens, prompt.blocks, prompt.digests, start, end)
        self.prompt_tokens += self.options.step_tokens - budget

    def _skip_cached(
        self, prompt: PromptState, planned: Sequence[tuple[PromptState, int, int]], batch: ScheduledBatch
    ) -> bool:
        """Count tokens as computed that the cache has, or another prompt computes in this step; never the last token,
        whose state is needed. False: the prompt waits for the next step, in which it copies what `planned` computes."""
        size, last = self.cache.block, len(prompt.tokens) - 1
        while prompt.computed % size == 0 and prompt.computed + size <= last:
            if not self.cache.filled[prompt.blocks[prompt.computed // size]]:
                break
            prompt.computed += size
        if not prompt.digests:
            return True
        position, full = prompt.computed, prompt.computed // size
        if position < last and any(
            start <= position < end
            and other.blocks[full - 1 : full] == prompt.blocks[full - 1 : full]
            and other.tokens[full * size : position + 1] == prompt.tokens[full * size : position + 1]
            for other, start, end in planned
        ):
            return False
        if position % size == 0:
            rest = prompt.tokens[position : min(position + size, last)]
            source, count = self.cache.longest_partial(prompt.digests[full], rest)
            if count:
                batch.copies.append((source, prompt.blocks[full]))
                prompt.computed += count
        return True

    def _plan_decode(self, batch: ScheduledBatch) -> None:
        """Decode responses whose prompts are computed: the last token, or after a preemption a chunk of the tokens."""
        budget, size = max(0, self.options.step_tokens - len(batch.tokens)), self.cache.block
        computed = [each for each in self.prompts.values() if each.computed == len(each.tokens)]
        for prompt, response in ((each, response) for each in computed for response in each.running):
            if response.sampled >= response.max_new_tokens:  # its last token is in flight
                continue
            most, row, index = max(1, budget), -1, -1
            chunk = response.tokens[response.computed : response.computed + most]
            if response.in_flight and len(chunk) < most:  # there is room for the token in flight, whose id is not known
                chunk, row = [*chunk, 0], response.row
            if chunk and prompt.hidden is None:
                # Preempted with its prompt, which is filled in this very step: there is no block to copy from yet.
                continue
            if chunk:
                # The prompt's last partial block goes on with the response: each has a copy of its own.
                if response.computed == 0 and len(prompt.tokens) % size:
                    batch.copies.append((prompt.blocks[-1], response.blocks[0]))
                shared, start = len(prompt.tokens) // size, len(prompt.tokens) + response.computed
                index = batch.add(chunk, start, prompt.blocks[:shared] + response.blocks, shared, row)
                response.computed += len(chunk)
                budget -= len(chunk) - 1
            # Without a chunk its first token is next: that is sampled from the prompt's hidden state, index -1.
            if response.computed == response.sampled:
                response.row = len(batch.samples)
                batch.samples.append((response, index))

    def _leave(self, response: Response) -> None:
        """Remove a running response and free its blocks; with the last one of a prompt, the prompt's too."""
        prompt = response.prompt_state
        assert prompt is not None
        self.running.remove(response)
        prompt.running.remove(response)
        self.cache.drop(response.blocks)
        response.prompt_state, response.blocks, response.computed = None, [], 0
        if not prompt.running:
            del self.prompts[response.prompt_key]
            self.cache.drop(prompt.blocks)
