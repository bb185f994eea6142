"""How commands reach ranks: `Transport`, of which torchrun and Ray each have one, and `run`, which gathers the answers.

RankGroup.call -> run -> Transport.send     -> RankWorker.carry_out -> the worker's method
                      <- Transport.receive  <-
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from verl.cluster.rank_context import TIMEOUT
from verl.cluster.rank_worker import RankWorker, stacks
from verl.errors import BrokenCollectiveError, ClusterError

logger = logging.getLogger(__name__)

#: Seconds in which the other ranks may end once one has failed.
GRACE = 3.0
_NO_ANSWER = "no answer"
STUCK = "another rank failed in a call that this rank is still in"


class Command(NamedTuple):
    """A command for one rank.

    Attributes:
        method: a method of `RankWorker`, or "stacks".
        args: its arguments.
        answers: whether its result is sent back.
        rows: this rank's rows of the batch that goes along; None: all.
    """

    method: str
    args: tuple[Any, ...] = ()
    answers: bool = True
    rows: Sequence[int] | None = None


class Event(NamedTuple):
    """A message from a rank: an "item", the "end" of its command, an "error" (an exception), or "gone" and why."""

    rank: int
    kind: str
    value: Any = None


class Transport:
    """The way to the ranks of a job. This one has a single rank, in this process; each group has its own, so that its
    worker is freed with it.

    Attributes:
        size: ranks of the job.
        own_rank: the rank in this process, which runs its commands here; -1: all ranks are elsewhere.
        worker: its workers, once it `has_started`.
        timeout: seconds that ranks wait for each other.
        ended: why the processes were ended; None: they were not.
        devices_a_machine: most devices of the placement's kind that a machine has for its ranks.
    """

    own_rank, size, devices_a_machine = 0, 1, 1
    timeout = TIMEOUT
    ended: str | None = None
    has_started = False
    worker: RankWorker

    def __init__(self, device: str) -> None:
        self.worker = RankWorker(device)

    def start(self) -> None:
        """Start or join the processes, which the first `send` does otherwise."""

    def send(
        self, commands: Mapping[int, Command], what: str, first: Any = None, collective: bool = False
    ) -> tuple[Any, Any]:
        """Begin commands of other ranks, by rank.

        Args:
            what: "ROLE.METHOD", for messages.
            first: a batch or a stream that goes to all of them, as the first argument of the worker's method.
            collective: they compute together with this rank, and wait while it is not drawn.

        Returns:
            What `receive` takes, and `first` for this rank; a stream feeds the others while it is drawn.

        Raises:
            ClusterError: a rank is gone or busy, or the job has ended.
        """
        return None, first

    def receive(self, sent: Any, seconds: float) -> list[Event]:
        """The next events; an empty list if no rank sent anything within `seconds`."""
        return []

    def who(self, rank: int) -> str:
        """A rank, for messages."""
        return "this process"

    def close(self, reason: str = "close() was called") -> None:
        """End the processes."""


def run(
    transport: Transport,
    commands: Mapping[int, Command],
    what: str,
    *,
    first: Any = None,
    is_independent: bool = False,
    collective: bool = False,
    timeout: float | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Have ranks carry out their commands; yields each answer with its rank, as it comes.

    Args:
        first, collective: see `Transport.send`.
        is_independent: ranks do not wait for each other, so that the failure of some leaves the others in step.
        timeout: seconds in which some rank must send something; None: the transport's.

    Raises:
        ClusterError: a rank died, or the deadline passed.
        Exception: a worker's own.
    """
    here, is_read, has_dead = transport.own_rank, True, False
    sent, first = transport.send(commands, what, first, collective)
    if here in commands:  # begun after the others have theirs: a collective in it would wait for them
        items = transport.worker.carry_out(*commands[here], first)
    elif isinstance(first, Iterator):
        deque(first, maxlen=0)
    pending, errors, since = {*commands}, dict[int, Exception](), time.monotonic()
    while pending:
        is_here, limit, had_errors = here in pending, timeout or transport.timeout, bool(errors)
        until = since + (min(GRACE, limit) if errors else limit)  # others may wait for the rank that failed
        events = transport.receive(sent, 0.0 if is_here else until - time.monotonic())
        if is_here and not events:  # a failure that is there has been seen before this rank may wait for others
            try:
                events.append(Event(here, "item", next(items)))
            except StopIteration:
                events.append(Event(here, "end"))
            except Exception as error:
                if len(commands) == 1:
                    raise
                if isinstance(first, Generator):
                    first.close()  # tells the others
                events.append(Event(here, "error", error))
        elif not events:
            break
        for rank, kind, value in events:
            if kind == "item" and is_read:
                try:
                    yield rank, value
                except GeneratorExit:
                    is_read = False  # the rest is received and dropped, so that the next call finds the ranks idle
            elif kind != "item" and rank in pending:
                pending.discard(rank)
                has_dead |= kind == "gone"
                if kind == "error":
                    errors[rank] = value
                elif kind == "gone":  # one that this process has ended is not the cause
                    error_class = ClusterError if transport.ended is None else BrokenCollectiveError
                    errors[rank] = error_class(died(transport.who(rank), f"in '{what}'", value))
                if errors and here in pending:
                    after(GRACE, _free, transport, pending)
            del value  # the next one may be made only once this one is let go
        if not had_errors:
            since = time.monotonic()
        if not is_read and pending == {here}:  # nobody else is left waiting in the stream
            items.close()
            return
    if pending or errors:
        is_broken = has_dead or not (is_independent or len(errors) == len(commands))
        raise _cause(transport, errors, sorted(pending), what, limit, is_broken)


def _free(transport: Transport, pending: set[int]) -> None:
    """Free this rank's own part if it still runs after a failure: it may be in a collective that the failed rank does
    not come to, and gloo frees it only when the other processes have ended."""
    if transport.own_rank in pending:
        transport.close(STUCK)


def after(seconds: float, function: Callable[..., Any], *args: Any) -> None:
    """Call a function later, unless this process has ended by then."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def died(who: str, where: str, why: str) -> str:
    """The error message for a rank whose process is gone."""
    return (
        f"{who} died {where}: {why}. The run cannot go on without it; the same command resumes it from its last "
        "checkpoint"
    )


def _cause(
    transport: Transport, errors: Mapping[int, Exception], late: list[int], what: str, limit: float, is_broken: bool
) -> Exception:
    """The error to raise: the first that is not just a collective broken by another rank; if all are, a timeout of the
    late ranks. The job is ended if its ranks may no longer be in step.

    Args:
        late: the ranks that have not ended.
    """
    by_rank = [errors[rank] for rank in sorted(errors)]
    if late and all(isinstance(error, BrokenCollectiveError) for error in by_rank):
        stalled = ClusterError(_stall(transport, late, what, limit))
        stalled.__cause__ = next(iter(by_rank), None)
        return stalled
    cause = min(by_rank, key=lambda error: isinstance(error, BrokenCollectiveError))
    if late or is_broken:
        transport.close(f"{type(cause).__name__}: {cause}")
    return cause


def _stall(transport: Transport, late: list[int], what: str, limit: float) -> str:
    """Log the stacks of all ranks, end the job, and return the error message of the missed deadline. It names only the
    late ranks that send no stack either, if there are any: the others wait for them."""
    here = transport.own_rank
    stack_of = dict.fromkeys(range(transport.size), _NO_ANSWER)
    if here in stack_of:
        stack_of[here] = stacks()
    if transport.ended is None:
        sent, _ = transport.send({rank: Command("stacks") for rank in stack_of if rank != here}, "stacks")
        until = time.monotonic() + GRACE
        while _NO_ANSWER in stack_of.values() and (events := transport.receive(sent, until - time.monotonic())):
            stack_of |= {rank: str(value) for rank, kind, value in events if kind != "end"}
    for rank, stack in stack_of.items():
        logger.error("%s stands at:\n%s", transport.who(rank), stack)
    silent = [rank for rank in late if stack_of[rank] == _NO_ANSWER] or late
    names = "; ".join(map(transport.who, silent))
    reason = f"'{what}' did not end within {limit:g} s: waited for {names}; stacks of all ranks are in the log"
    transport.close(reason)
    return reason
