"""Episodes: how a row of prompts becomes responses. `async episode(client, row) -> responses`.

An episode calls `await client.generate(tokens)` any number of times. Episodes run concurrently: one thread steps the
engine over all their requests. The default is a single turn:

    async def single_turn(client, row):
        return [Turns().wrote(await client.generate(row["prompt_tokens"]))]

Several turns make up one response; tokens that the policy did not generate (a tool's output) are masked, and no token
is decoded and encoded again. An episode may have an attribute `deadline`, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from verl._host.user_calls import LateError, Running, UserCode, is_users, within
from verl._host.user_code import describe, show_once, traceback_of
from verl.data.chat import ChatTokenizer
from verl.data.text import ResponseText
from verl.errors import ConfigError, RolloutError, shown
from verl.rollout.base import Guard, LogitsProcessor, Request, RolloutEngine, Sample, SamplingParams, check_new
from verl.rollout.stop_strings import cut_text
from verl.rollout.turns import Outcome, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.rollout.grammar import Grammar

logger = logging.getLogger(__name__)

#: Seconds for an episode that has no deadline of its own.
DEADLINE = 600.0
#: Why log-probs of the likeliest tokens are refused.
NO_TOP = "this rollout engine gives log-probs of sampled tokens alone: use the engine embedded or hf"


class FailedEpisodeError(RolloutError):
    """An episode that failed, and counts for nothing.

    Attributes:
        reason: in a word, by which metrics count it.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


#: Of prompts: its columns.
Row = Mapping[str, Any]
Episode = Callable[["Client", Row], Awaitable[Sequence[Turns]]]


async def single_turn(client: Client, row: Row) -> list[Turns]:
    """One response to the row's `prompt_tokens`."""
    return [Turns().wrote(await client.generate(row["prompt_tokens"]))]


class Client:
    """An episode's access to the engine. Request ids are made of the row's id and a number within the episode.

    Attributes:
        params: sampling parameters of the row.
        tokenizer: the policy's.
        text: tokens of a response -> their text, as rewards read it; None without a tokenizer.
        start: a client of the weights that training began with; None: the run keeps none.
        max_length: how many tokens prompt and response may have together; None: the engine does not say.
        tells_top: whether the engine gives log-probs of other tokens than the sampled ones.
    """

    def __init__(self, pump: _Pump, row_id: str, params: SamplingParams, text: ResponseText | None) -> None:
        self.params, self.text = params, text
        self.tokenizer: PreTrainedTokenizerBase | None = None if text is None else text.tokenizer
        self.start: Client | None = None
        self.max_length, self.tells_top = pump.max_length, pump.tells_top
        self._pump, self._row_id, self._requests = pump, row_id, 0

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        processors: tuple[LogitsProcessor, ...] = (),
        guard: Guard | None = None,
        grammar: Grammar | None = None,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        top_log_probs: int = 0,
    ) -> Sample:
        """A sample that continues these tokens, by `self.params` unless `params` are given; see `Request`.

        Args:
            on_tokens: called in the event loop with the tokens so far, after each step of an engine that tells them.

        Raises:
            RolloutError: the engine refuses the request, or failed.
        """
        name = self._row_id if self._requests == 0 else f"{self._row_id}#{self._requests}"
        self._requests += 1
        params = params or self.params
        count, wanted, limit = len(prompt_tokens), params.max_new_tokens, self.max_length
        if limit is not None and count + wanted > limit and not self._pump.has_warned:
            self._pump.has_warned = True
            text = "a response to a prompt of %d tokens ends before max_new_tokens=%d: prompt and response together may"
            logger.warning(f"{text} have %d", count, wanted, limit)
        tokens: list[int] = []
        on_token = None if on_tokens is None else tokens.append
        if top_log_probs and not self.tells_top:
            raise RolloutError(f"request '{name}': {NO_TOP}")
        request = Request(name, prompt_tokens, params, processors, guard, grammar, on_token, True, top_log_probs)
        sample = await self._pump.answer(request, on_tokens and (lambda: on_tokens(tokens)))
        sample.temperature = params.temperature
        if self.text is not None and (params.stop or guard is not None):
            sample.text = cut_text(self.text, sample.tokens, params)
        return sample


class _Pump:
    """Steps an engine in one thread while there are requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.max_length: int | None = getattr(engine, "max_length", None)
        self.tells_top: bool = getattr(engine, "tells_top", False)
        self.has_warned = False  # of responses that the longest length cuts short
        self._waiting: dict[str, asyncio.Future[Sample]] = {}
        self._new: list[Request] = []
        self._after_step: dict[str, Callable[[], None]] = {}
        self._dropped: list[str] = []
        self._asked = asyncio.Event()
        self._failure = ""
        self._loop = asyncio.get_running_loop()

    async def answer(self, request: Request, after_step: Callable[[], None] | None = None) -> Sample:
        """The sample of a request, from any event loop."""
        if (here := asyncio.get_running_loop()) is not self._loop:
            after: Any = after_step and partial(here.call_soon_threadsafe, after_step)
            work = self.answer(request, after)
            try:
                sample = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:  # its loop is closed
                work.close()
                raise RolloutError("the rollout has ended") from None
            return await asyncio.wrap_future(sample)
        if self._failure:
            raise RolloutError(self._failure)
        future: asyncio.Future[Sample] = self._loop.create_future()
        check_new(request, self._waiting)
        self._waiting[request.id] = future
        self._new.append(request)
        if after_step is not None:
            self._after_step[request.id] = after_step
        self._asked.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._dropped.append(request.id)
            self._asked.set()
            raise
        finally:
            self._after_step.pop(request.id, None)

    async def run(self, thread: ThreadPoolExecutor) -> None:
        """Serve requests in this thread until cancelled; if the engine fails, all of them fail."""
        while True:
            if not (self._new or self._dropped or self._engine.unfinished):
                self._asked.clear()
                await self._asked.wait()
            new, self._new, dropped, self._dropped = self._new, [], self._dropped, []
            try:
                results = await self._loop.run_in_executor(thread, self._step, new, dropped)
            except Exception as error:
                self._failure = f"the rollout engine failed: {error}"
                for future in self._waiting.values():  # they stay listed, as the engine may still have them
                    if not future.done():
                        future.set_exception(RolloutError(self._failure))
                raise
            for call in self._after_step.values():
                call()
            for name, result in results.items():
                if (waiting := self._waiting.pop(name, None)) is not None and not waiting.done():
                    if isinstance(result, Sample):
                        waiting.set_result(result)
                    else:
                        waiting.set_exception(result)

    def drain(self) -> None:
        """Abort the remaining requests, so that the engine returns none of them later."""
        self._failure = self._failure or "the rollout has ended"
        if self._waiting:
            self._engine.abort(list(self._waiting))
            self._engine.step()

    def _step(self, new: list[Request], dropped: list[str]) -> dict[str, Sample | RolloutError]:
        results: dict[str, Sample | RolloutError] = {}
        for request in new:
            try:
                self._engine.add(request)
            except RolloutError as error:
                results[request.id] = error
        self._engine.abort(dropped)
        return results | {sample.id: sample for sample in self._engine.step()}


class EndOfRunError(RolloutError):
    """What an episode raises to end the run, not just itself."""


async def run_episodes(
    engine: RolloutEngine,
    rows: Sequence[Row],
    params: SamplingParams | Sequence[SamplingParams],
    episode: Episode = single_turn,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ends: Sequence[int] | None = None,
    start: RolloutEngine | None = None,
) -> AsyncGenerator[Outcome, None]:
    """Run one episode per row and yield the outcomes in the order in which they finish. If one raises or exceeds its
    `deadline` (600 s if it sets no other), its outcome has an error and its requests are aborted; the others continue.

    Args:
        rows: each has `id` and the columns that the episode reads; `messages` of JSON it gets as a list.
        params: of all rows, or one per row.
        ends: tokens that end a response; None: the tokenizer's.
        start: an engine of the weights that training began with, for `Client.start`; both compute in one thread.

    Raises:
        RolloutError: the engine failed, or an episode ends the run.
        ConfigError: a response was sampled at another temperature than its row's.
    """
    pumps = [_Pump(each) for each in (engine, start) if each is not None]
    thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
    pumping = [asyncio.create_task(pump.run(thread)) for pump in pumps]
    seconds = float(getattr(episode, "deadline", DEADLINE))
    if tokenizer is not None and ends is None:
        ends = ChatTokenizer(tokenizer).ends
    text = None if tokenizer is None else ResponseText(tokenizer, ends or ())

    # A user's episode may block its event loop, which must not be the engine's.
    call: Any = UserCode("episode").call
    if not is_users(episode):
        call = lambda seconds, episode, *args: within(episode(*args), seconds)  # noqa: E731

    async def one(index: int) -> Outcome:
        row = rows[index]
        if isinstance(row.get("messages"), str):  # as rows keep them
            row = {**row, "messages": json.loads(row["messages"])}
        sampling = params if isinstance(params, SamplingParams) else params[index]
        client = Client(pumps[0], str(row["id"]), sampling, text)
        if start is not None:
            client.start = Client(pumps[1], f"{row['id']}@start", sampling, text)
        return await _outcome(index, row, sampling, call(seconds, episode, client, row))

    tasks = [asyncio.create_task(one(index)) for index in range(len(rows))]
    try:
        for done in asyncio.as_completed(tasks):
            outcome = await done
            for ended in filter(asyncio.Task.done, pumping):
                ended.result()
            yield outcome
    finally:
        for task in [*tasks, *pumping]:
            task.cancel()
        await asyncio.wait([*tasks, *pumping])
        thread.shutdown()  # behind a step that still runs
        for pump, ended in zip(pumps, pumping, strict=True):
            failed = not ended.cancelled() and ended.exception() is not None
            with suppress(Exception) if failed else nullcontext():  # the engine has failed already
                pump.drain()


async def _outcome(index: int, row: Row, params: SamplingParams, responses: Awaitable[Any]) -> Outcome:
    """Raises EndOfRunError; ConfigError unless it returns a list of `Turns` sampled at the row's temperature."""
    name = f"episode of row '{row['id']}'"
    try:
        turns = await responses
    except EndOfRunError:
        raise
    except LateError as late:
        return Outcome(index, [], f"{name} {late}", "late")
    except Exception as fault:  # a user's code may raise anything; only this row fails
        show_once(logger, "episode", traceback_of(fault))
        return Outcome(index, [], f"{name}: {describe(fault)}", getattr(fault, "reason", "raised"))
    if not turns:
        return Outcome(index, [], f"{name} gave 0 responses", "no_response")
    if not isinstance(turns, Sequence) or not all(isinstance(each, Turns) for each in turns):
        raise ConfigError(f"an episode returns a list of Turns; that of row '{row['id']}' gave {shown(turns)}")
    # Log-probs and updates are computed at one temperature; greedy rows are not trained.
    other = {temperature for each in turns for temperature in each.temperatures} - {params.temperature}
    if params.temperature and other:
        raise ConfigError(
            f"the {name} sampled at temperature {min(other):g}, but is trained at {params.temperature:g}: sample at "
            "client.params.temperature, which the run's sampling sets"
        )
    return Outcome(index, turns)


def outcomes(engine: RolloutEngine, rows: Sequence[Any], *args: Any, **options: Any) -> Generator[Outcome, None, None]:
    """`run_episodes` for synchronous code, whether or not an event loop runs in this thread."""
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()

    async def collect() -> None:
        async with aclosing(run_episodes(engine, rows, *args, **options)) as episodes:
            async for outcome in episodes:
                done.put(outcome)

    task = loop.create_task(collect())
    ended = Running(loop.run_until_complete, task, name="episodes")
    ended.add_done_callback(lambda ended: done.put(None))
    try:
        while (outcome := done.get()) is not None:
            yield outcome
        ended.result()
    finally:
        loop.call_soon_threadsafe(task.cancel)  # where the caller has had enough
        wait([ended])
        loop.close()
