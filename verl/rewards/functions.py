"""A user's function as a reward: each call has a deadline, and failures are counted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from os import PathLike
from typing import Any, ClassVar

from verl._base.checked import checked
from verl._base.record import Count, Portion, Retries, Seconds
from verl._host.user_code import show_once
from verl._host.user_functions import load_function, split_spec
from verl.batch import WRITTEN, Batch
from verl.errors import ConfigError, RewardError, nearest
from verl.rewards.calls import Caller, ThreadCaller
from verl.rewards.failures import Failures
from verl.rewards.processes import ProcessCaller, can_travel
from verl.rewards.scores import Call, Score, failure
from verl.rewards.signatures import cell, name_of, recognise, user_columns
from verl.rewards.source import RewardResult

logger = logging.getLogger(__name__)
#: What torch says where a fork uses an accelerator that was in use before.
_FROM_A_FORK = re.compile("in forked subprocess|CUDA error: initialization error")
#: The reason of an error: its type, and the file and line that raised it do not differ from sample to sample.
_ERROR = re.compile(r"(?s)\Araised (\w+).* \((?:.*/)?(.+) line (\d+), in .*\)\Z")


#: Options of `FunctionReward` that every other kind of reward passes on to it.
PASSED_ON = ("name", "timeout", "retries", "default_reward", "max_failure_rate", "workers", "process")


class FunctionReward:
    """A function as a reward, with a deadline for each call and a limit to how often it may fail.

    Args:
        source: the function, plain or async, or "FILE.py:FUNCTION".
        name: for messages and columns; the function's own if not given.
        timeout: seconds for one call. A late call ends with its process; one in a thread is left behind. After three
            late calls in one `score` the remaining samples abstain.
        retries: further calls after one that raised or was late.
        default_reward: the reward of a sample whose scoring failed; None: it abstains. (If the function returns None
            for a sample, that is no failure: the sample abstains in any case.)
        max_failure_rate: if more of the latest 256 samples failed, the run ends; not checked below 64 samples.
        batch_size: samples in one call; None: one group (the samples of a prompt), or one sample in workers and with
            verl's signature. Samples without a column `group` are one group.
        whole_batch: one call gets all samples of a step, once the last is there: for scores that depend on other
            prompts. None: as the function's attribute `whole_batch` says, if it has one.
        workers: makes a `Caller` with worker processes from (source, name); None: see `process`.
        process: call the function in one process of its own, for the whole run. It is forked at the first call: what it
            changes in objects of the script is not seen there. False (as an attribute of the function may say), or for
            functions that reach a model or a tensor: a thread of this process calls it, and if it holds the interpreter
            longer than `timeout` (a regular expression, a huge power), this process ends by name.

    Raises:
        ConfigError: the function has no known signature, or an option is invalid.
    """

    #: What messages call it.
    what: ClassVar[str] = "reward"
    #: Columns of which it needs one.
    one_of: ClassVar[tuple[str, ...]] = ()
    #: Whether a function that gets all samples in one call is called on fewer, too, where that call fails.
    calls_on_fewer: ClassVar[bool] = False
    #: See `Signature.judges`; a function may have it as an attribute.
    judges: ClassVar[str | None] = None
    #: Whether calls are made in worker processes also where none were asked for.
    needs_processes: ClassVar[bool] = False

    @checked
    def __init__(
        self,
        source: Callable[..., Any] | str | PathLike[str],
        *,
        name: str | None = None,
        timeout: Seconds = 30.0,
        retries: Retries = 0,
        default_reward: float | None = None,
        max_failure_rate: Portion = 0.5,
        batch_size: Count | None = None,
        whole_batch: bool | None = None,
        workers: Callable[[Callable[..., Any] | str, str], Caller] | None = None,
        process: bool = True,
    ) -> None:
        spec = None if callable(source) else str(source)
        self.function = function = source if callable(source) else load_function(str(source))
        #: From the name of some data and a batch of them; raises DataError if a column names what is not known.
        self.check_values: Callable[[str, Batch], None] = getattr(function, "check_values", lambda *_: None)
        self.signature = recognise(function)._replace(judges=getattr(function, "judges", self.judges))
        self.name = name or (split_spec(spec)[1] if spec else name_of(function))
        if batch_size is not None and self.signature.by_row:
            raise ConfigError(f"reward '{self.name}': with batch_size its signature must take several samples")
        self.whole_batch = getattr(function, "whole_batch", False) if whole_batch is None else whole_batch
        if self.whole_batch and (self.signature.by_row or batch_size is not None or workers):
            raise ConfigError(
                f"reward '{self.name}': whole_batch is one call on all samples: its signature must take several, and "
                "batch_size and workers be left out"
            )
        self.timeout, self.retries = timeout, retries
        self.default_reward, self.failures = default_reward, Failures(max_failure_rate)
        self._rows = 1 if self.signature.by_row or (workers and batch_size is None) else batch_size
        self._is_by_group = self._rows is None and not self.whole_batch
        #: Makes the calls: a `RewardPool` with `workers`, else a `ProcessCaller` or a `ThreadCaller`.
        is_forked = process and getattr(function, "process", True) and can_travel(function)
        self.call_in(workers or (ProcessCaller if is_forked else ThreadCaller), spec if workers else None)
        self._lock = threading.Lock()
        #: Of the run; with the ids of its rows it seeds the random generators of a call.
        self.seed = 0
        self._noted: set[str] = set()
        self._unsaid: Counter[str] = Counter()
        self._scored = 0
        self._latest: str | None = None

    def call_in(self, make: Callable[[Any, str], Caller], function: Callable[..., Any] | str | None = None) -> None:
        """Have the calls made by what `make` makes; `function` may be "FILE.py:FUNCTION"."""
        self.group = make(function or self.function, self.name)
        weakref.finalize(self, self.group.close)

    @property
    def columns(self) -> tuple[str, ...]:
        """See `verl.rewards.source.columns_read`."""
        return (*self.signature.columns, *(["group?"] if self._is_by_group else []))

    def check_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Look at the first rows of the data before anything is sampled.

        Raises:
            RewardError: a column that the function needs is missing, or all columns of `one_of`.
        """
        label = f"{self.what} '{self.name}'"
        self.signature.check(label, {**dict.fromkeys(WRITTEN), **rows[0], "response": ""})
        if self.one_of and not any(cell(dict(row), name) is not None for row in rows for name in self.one_of):
            raise RewardError(
                f"{label} reads the column {' or '.join(self.one_of)}, and the data have none: "
                f"{nearest(self.one_of[0], user_columns(dict(rows[0])))}"
            )

    async def score(self, batch: Batch) -> RewardResult:
        """Raises RewardError if a column that the function needs is missing, or it fails too often."""
        rows = list(batch.rows())
        if not rows:
            return RewardResult([])
        self.signature.check(f"{self.what} '{self.name}'", rows[0])
        cuts = self._cuts(batch)
        counts: Counter[str] = Counter()

        async def scored(cut: Sequence[int]) -> list[Score]:
            async with self.group.slots:
                return await self._attempts([rows[row] for row in cut], counts)

        scores = await asyncio.gather(*map(scored, cuts))
        by_row = dict(zip(chain.from_iterable(cuts), chain.from_iterable(scores), strict=True))
        return self._result([by_row[row] for row in range(len(rows))], counts)

    def _cuts(self, batch: Batch) -> Sequence[Sequence[int]]:
        """The numbers of the rows of each call. They are the same whether a step is scored at once or as it comes."""
        by_group = self._is_by_group and "group" in batch
        groups: Sequence[Sequence[int]] = batch.group_indices() if by_group else [range(len(batch))]
        size = self._rows or len(batch)
        return [group[start : start + size] for group in groups for start in range(0, len(group), size)]

    async def _attempts(self, rows: list[dict[str, Any]], counts: Counter[str]) -> list[Score]:
        """The scores of the rows of one call, which is tried again where it fails."""
        scores: list[Score] = []
        for attempt in range(1 + self.retries):
            if counts["late"] >= self.group.max_late:
                return [
                    failure(f"not tried: {counts['late']} calls before gave no answer within {self.timeout:g} s")
                ] * len(rows)
            counts["retries"] += attempt > 0
            answer = await self._call(rows, self.timeout)
            is_late = answer is None
            counts["late"] += is_late
            answer = answer or [failure(f"gave no answer within {self.timeout:g} s")]
            failed_whole = len(answer) < len(rows)
            answer = answer * len(rows) if failed_whole else answer
            # A retry replaces failures only.
            scores = [new if old.failed else old for old, new in zip(scores or answer, answer, strict=True)]
            if not any(score.failed for score in scores):
                return scores
        may_call_on_fewer = self.calls_on_fewer or not self.whole_batch
        if failed_whole and may_call_on_fewer and (self.group.ends_late or not is_late):
            return await self._isolate(rows, scores[0], is_late)
        return scores

    async def _isolate(self, rows: list[dict[str, Any]], failed: Score, is_late: bool) -> list[Score]:
        """The scores of the rows of a call that failed for all of them: see `isolate`. Its calls together have as
        long as that one had; if that was late, each has half its share of it by its rows."""
        until, seconds = time.monotonic() + self.timeout, self.timeout / (2 * len(rows)) if is_late else math.inf

        async def call(part: Sequence[int]) -> list[Score]:
            left = min(until - time.monotonic(), seconds * len(part))
            answer = None if left <= 0 else await self._call([rows[row] for row in part], left)
            if answer is None and (left <= 0 or not self.group.ends_late):
                raise TimeoutError
            return answer or [failure(f"gave no answer within {self.timeout:g} s")]

        return await isolate(call, len(rows), failed)

    async def _call(self, rows: Sequence[dict[str, Any]], seconds: float) -> list[Score] | None:
        args, kwargs = self.signature.arguments(rows)
        ids = json.dumps([self.seed, *(row["id"] for row in rows)]).encode() if "id" in rows[0] else None
        seed = None if ids is None else int.from_bytes(hashlib.sha256(ids).digest()[:4], "big")
        count = None if self.signature.by_row else len(rows)
        answer = await self.group.call(call := Call(args, kwargs, count, seed), seconds)
        if not answer or not _FROM_A_FORK.search(answer[0].reason or ""):
            return answer
        if isinstance(self.group, ProcessCaller):  # of several calls under way the first one has seen to it
            text = "%s %s uses an accelerator, which a forked process cannot: this process calls it from now on"
            logger.warning(text, self.what, self.name)
            self.group.close()
            self.call_in(ThreadCaller)
        return await self.group.call(call, seconds)

    def log_failures(self) -> None:
        """Log, in one line, how many samples have failed since this was called last, and why."""
        with self._lock:
            unsaid, scored = self._unsaid, self._scored
            self._unsaid, self._scored = Counter(), 0
        if unsaid:
            reasons = ", ".join(f"{reason} (x{count})" for reason, count in unsaid.most_common(5))
            logger.warning(
                "%s %s: %d of %d samples have no score: %s; the latest: %s",
                *(self.what, self.name, unsaid.total(), scored, reasons, self._latest),
            )

    def _result(self, scores: Sequence[Score], counts: Counter[str]) -> RewardResult:
        with self._lock:
            too_many = self.failures.add(score.failed for score in scores)
            self._unsaid.update(_ERROR.sub(r"\1 at \2:\3", score.reason or "") for score in scores if score.failed)
            self._scored += len(scores)
            notes = {score.note for score in scores if score.note} - self._noted
            self._noted |= notes
            self._latest = next((score.reason for score in scores if score.failed), self._latest)
        for note in sorted(notes):
            logger.warning("%s %s %s: its scores are others in every run", self.what, self.name, note)
        for text in dict.fromkeys(score.traceback for score in scores):
            show_once(logger, f"{self.what} {self.name}", text)
        if too_many:
            raise RewardError(
                f"{self.what} function '{self.name}' failed on {too_many} (latest: {self._latest}). "
                "Fix it, raise its timeout, or raise max_failure_rate"
            )
        counts.update(self.group.take_counts(), failures=sum(score.failed for score in scores))
        names = dict.fromkeys(name for score in scores for name in score.components)
        return RewardResult(
            [self.default_reward if score.failed else score.value for score in scores],
            {name: [score.components.get(name) for score in scores] for name in names},
            [score.reason for score in scores],
            {what: count for what, count in counts.items() if count},
        )


async def isolate(call: Callable[[Sequence[int]], Awaitable[list[Score]]], count: int, failed: Score) -> list[Score]:
    """The scores of `count` samples whose call failed for all of them, since some of them make it fail.

    Calls on halves find the first sample that makes it fail. Then the others are called
    together, so that scores which depend on the samples of a call still belong together; and so on, until that call
    gives scores. For each such sample these are at most 2 log2(count) calls.

    Args:
        call: from the numbers of some samples to their scores, or to a single one if the call failed. Where no more
            calls can be made it raises TimeoutError, and the samples that have no score by then share `failed`.
        failed: what the call on all samples said.
    """
    rest, scores, answer = list(range(count)), dict[int, Score](), [failed]
    try:
        while len(answer) < len(rest):
            part, reason, right = rest, failed, (list[int](), list[Score]())
            while len(part) > 1:
                half = part[: (len(part) + 1) // 2]
                answer = await call(half)
                if len(answer) < len(half) or (len(half) == 1 and answer[0].failed):
                    part, reason = half, answer[0]
                else:
                    part, right = part[len(half) :], (half, answer)
            miscounted = str(reason.reason).startswith("returned")
            if miscounted or reason is failed:  # no call on fewer samples has failed yet
                reason = (await call(part))[0]
            if miscounted and not reason.failed:  # the function counts wrong, whatever the samples
                answer = [failed]
                break
            scores[part[0]] = reason
            rest = [sample for sample in rest if sample != part[0]]
            answer = right[1] if right[0] == rest else await call(rest)
    except TimeoutError:
        answer = [failed]
    scores |= zip(rest, answer if len(answer) == len(rest) else answer * len(rest), strict=True)
    return [scores[sample] for sample in range(count)]
