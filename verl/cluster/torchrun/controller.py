"""Ranks that torchrun has started: rank 0 runs the script and its own part of each call, the others serve its orders.

All ranks run the script up to its first call. There they compare what they have registered; from then on the script is
that of rank 0 alone. The other ranks end when it ends, or when rank 0 is gone.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from verl._host import ranks
from verl._host.ranks import local_ranks, rank_here, registry, torchrun_ranks, who
from verl.batch import Batch
from verl.cluster.group import GRACE, NO_ANSWER, Call, died, raise_cause
from verl.cluster.rank_context import TIMEOUT, RoleMeshes
from verl.cluster.rank_worker import RankWorker, stacks
from verl.cluster.torchrun.codec import decode_error, encode_error
from verl.cluster.torchrun.link import Link, Message, control_group
from verl.cluster.world import World
from verl.errors import BrokenCollectiveError, ClusterError

logger = logging.getLogger(__name__)

#: Seconds for the threads of a link at the end of the process.
_LEAVING = 5.0


class TorchrunJob:
    """The ranks of this torchrun job, seen from rank 0. See `group.Job`; there is one a process.

    Attributes:
        timeout: seconds that ranks wait for each other.
        kind: "cpu" or "cuda".
    """

    def __init__(self) -> None:
        self.timeout, self.kind = TIMEOUT, "cpu"
        self._worker: RankWorker | None = None
        self._links: dict[int, Link] = {}
        self._about: dict[int, Mapping[str, Any]] = {}
        self._lock = threading.RLock()  # orders reach all ranks in the order in which they are carried out here
        self._serials, self._keys = itertools.count(1), itertools.count()
        self._inboxes: dict[int, queue.SimpleQueue[tuple[int, Message]]] = {}
        self._gone: dict[int, str] = {}
        self._executing: set[int] = set()
        #: Streams whose ranks compute together -> what they are and those ranks.
        self._shared: dict[int, tuple[str, frozenset[int]]] = {}
        self.ended: str | None = None

    @property
    def has_started(self) -> bool:
        return self._worker is not None

    @property
    def devices_a_machine(self) -> int:
        return local_ranks()

    @property
    def worker(self) -> RankWorker:
        """This rank's workers; the first use starts the job."""
        self.start()
        assert self._worker is not None
        return self._worker

    def start(self) -> None:
        """The first call: on rank 0 it returns once all ranks are there, on another rank it never returns.

        Raises:
            ClusterError: the ranks have made other handles, or the same in another order.
        """
        with self._lock:
            if self._worker is not None:
                return
            local = os.environ.get("LOCAL_RANK", str(rank_here()))
            device = f"cuda:{local}" if self.kind == "cuda" else self.kind
            world = World(rank_here(), torchrun_ranks(), None, self.timeout, device)
            group = control_group(world.rank, world.size, self.timeout)
            self._worker, registry.is_closed = RankWorker(world), True
            if world.rank != 0:
                _Serving(self._worker, group).run()
            self._meet(group, world)

    def _meet(self, group: Any, world: World) -> None:
        for rank in range(1, world.size):
            link = Link(group, rank, partial(self._deliver, rank))
            try:
                self._about[rank] = link.receive().body
            except RuntimeError as error:
                raise died(
                    f"rank {rank} of {world.size}", "before the first call", f"it was silent ({error})"
                ) from error
            self._links[rank] = link
        for link in self._links.values():
            link.open()
        atexit.register(self._end, world)
        for rank, about in self._about.items():
            if (reason := _first_difference(registry.labels, about["labels"], rank)) is not None:
                self.close(reason)
                raise ClusterError(reason)

    def make(self, recipe: partial[Any], role: RoleMeshes) -> int:
        # A generator: rank 0 begins its own part when `_Running` draws it, after the others have their messages. Called
        # at once, a collective in it would wait for ranks that know of nothing.
        worker, key = self.worker, next(self._keys)
        messages = dict.fromkeys(self._links, Message.of("make", body=(key, recipe, role)))
        local = (make(key, recipe, role) for make in (worker.make,))
        deque(_Running(self, f"{role.role}.start", messages, local), maxlen=0)
        return key

    def everywhere(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        worker = self.worker
        messages = {rank: Message.of("run", body=(function, arguments[rank]), answers=True) for rank in self._links}
        local = (run(function, arguments[0]) for run in (worker.run,))
        answers = dict(_Running(self, getattr(function, "__name__", "everywhere"), messages, local))
        return [answers[rank] for rank in range(len(arguments))]

    def run(self, call: Call) -> Iterator[tuple[int, Any]]:
        worker = self.worker
        first: Any = call.args[0] if call.args else None
        is_batch, is_stream = isinstance(first, Batch), isinstance(first, Iterator)
        args = call.args[1:] if is_batch or is_stream else call.args
        whole: Message | None = None
        messages = {}
        for rank, rows in call.rows.items():
            if rank == 0:
                continue
            if whole is None or rows is not None:
                batch = None if not is_batch else first if rows is None else first.take(rows)
                whole = Message.of("order", body=(call.role, call.method, args, call.kwargs, is_stream, batch))
            messages[rank] = replace(whole, answers=rank in call.answering)
        fed = self._fed(first, list(messages)) if is_stream else None
        local: Iterator[Any] | None = None
        if 0 in call.rows:
            rows = call.rows[0]
            content = [first if rows is None else first.take(rows)] if is_batch else [fed] if is_stream else []
            local = worker.execute(call.role, call.method, (*content, *args), call.kwargs)
        is_shared = call.is_stream and call.is_independent and len(call.answering) < len(call.rows)
        return iter(_Running(self, call.what, messages, local, fed, call.is_independent, is_shared))

    def _fed(self, stream: Iterator[Any], to: Sequence[int]) -> Iterator[Any]:
        """The stream, whose items are sent to other ranks on the way."""
        try:
            for item in stream:
                message = Message.of("item", body=item)
                for rank in to:
                    self._links[rank].send(message)
                yield item
        except BaseException:
            self._tell(Message("cut"), to)
            raise
        self._tell(Message("last"), to)

    def send(self, serial: int, messages: Mapping[int, Message], what: str) -> queue.SimpleQueue[tuple[int, Message]]:
        """Begin a call: its messages, and where its answers arrive.

        Raises:
            ClusterError: a rank is gone, or waits in a stream for orders of this one.
        """
        with self._lock:
            if self.ended is not None:
                raise ClusterError(f"the ranks have been ended: {self.ended}")
            if gone := self._gone.keys() & messages.keys():
                raise self._died(min(gone), "before this call")
            for stream, busy in self._shared.values():
                if not busy.isdisjoint(messages):
                    raise ClusterError(
                        f"'{what}' was called while the stream of '{stream}' is open: its ranks are busy until it "
                        "ends. Exhaust the iterator or close() it first"
                    )
            inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
            self._inboxes[serial] = inbox
            for rank, message in messages.items():
                try:
                    self._links[rank].send(replace(message, serial=serial))
                except BrokenCollectiveError as error:  # before the reading thread has noticed
                    self._deliver(rank, Message("gone", tree=str(error)))
            return inbox

    def _deliver(self, rank: int, message: Message) -> None:
        """Called by the reading thread of a link."""
        if message.do == "signal":
            on_signal = ranks.on_signal or partial(os.kill, os.getpid())
            on_signal(int(message.tree))
        elif message.do == "gone":
            self._gone[rank] = str(message.tree)
            if self.ended is None:  # torchrun may end this process before it has raised the error
                logger.error("%s died: %s", self.who(rank), message.tree)
            for serial, inbox in [*self._inboxes.items()]:
                inbox.put((rank, message))
                self._free_later(serial)
        elif (waiting := self._inboxes.get(message.serial)) is not None:
            waiting.put((rank, message))
            if message.do == "error":
                self._free_later(message.serial)

    def _free_later(self, serial: int) -> None:
        """This rank may be in a collective that a failed rank does not come to, and gloo frees it only when the other
        processes have ended."""

        def free() -> None:
            if serial in self._executing:
                self.close("another rank failed in a call that this rank is still in")

        _after(GRACE, free)

    def who(self, rank: int) -> str:
        """A rank, for messages."""
        about = self._about.get(rank, {"host": socket.gethostname(), "pid": os.getpid()})
        return f"rank {rank} of {torchrun_ranks()} (host {about['host']}, pid {about['pid']})"

    def _died(self, rank: int, where: str) -> ClusterError:
        return died(self.who(rank), where, self._gone[rank])

    def stacks(self) -> dict[int, str]:
        inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._inboxes[0] = inbox
        self._tell(Message("stacks"), list(self._links), wait=0.0)
        by_rank, until = {0: stacks()}, time.monotonic() + GRACE
        while len(by_rank) <= len(self._links) and (left := until - time.monotonic()) > 0:
            try:
                rank, message = inbox.get(timeout=left)
            except queue.Empty:
                break
            by_rank[rank] = str(message.tree)
        return {rank: by_rank.get(rank, NO_ANSWER) for rank in range(torchrun_ranks())}

    def close(self, reason: str = "close() was called") -> None:
        """End the other ranks. Their exit code is 0: what the failure means is for the script to say."""
        if self.ended is None:
            self.ended = reason
            self._tell(Message("exit"), list(self._links), wait=1.0)

    def _tell(self, message: Message, to: Sequence[int], wait: float = GRACE) -> None:
        """Send a message to ranks, of which one that is stopped does not take it: leave it so after `wait` seconds."""
        threads = [threading.Thread(target=self._links[rank].try_to_send, args=(message,), daemon=True) for rank in to]
        for thread in threads:
            thread.start()
        until = time.monotonic() + wait
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _end(self, world: World) -> None:
        """At the end of the script. An error that ended it ends the others with an exit code of 1."""
        failed = getattr(sys, "last_value", None) is not None
        self._tell(Message("end", tree=int(failed)), [rank for rank in self._links if rank not in self._gone])
        for link in self._links.values():
            link.close()
            link.reader.join(_LEAVING)
        world.leave()


@dataclass(eq=False)
class _Running:
    """One call: iterating sends each rank its message, does this rank's part, and yields what all of them answer.

    Attributes:
        fed: a stream that goes to the other ranks while it is drawn.
        is_independent: a failure of some ranks does not set them apart from the others.
        is_shared: a stream whose ranks compute together: while this rank is not in it, the others wait.
        pending: the other ranks that have not ended yet.
    """

    job: TorchrunJob
    what: str
    messages: Mapping[int, Message]
    local: Iterator[Any] | None
    fed: Iterator[Any] | None = None
    is_independent: bool = False
    is_shared: bool = False
    serial: int = 0
    count: int = 0
    pending: set[int] = field(default_factory=set)
    errors: dict[int, Exception] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    inbox: queue.SimpleQueue[tuple[int, Message]] = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        try:
            yield from self._items()
        except GeneratorExit:
            deque(self._items(), maxlen=0)  # no rank may be left waiting in a stream
            raise

    def _items(self) -> Iterator[tuple[int, Any]]:
        """The answers as they come; called again, those that are left."""
        if not self.serial:
            self.serial = next(self.job._serials)
            self.count, self.pending = len(self.messages) + (self.local is not None), set(self.messages)
            self.inbox = self.job.send(self.serial, self.messages, self.what)
            if self.is_shared:
                self.job._shared[self.serial] = self.what, frozenset(self.messages)
            self.messages = {}
        yield from self._local_items()
        since = time.monotonic()
        while self.pending:
            limit = min(GRACE, self.job.timeout) if self.errors else self.job.timeout
            try:
                rank, message = self.inbox.get(timeout=max(0.0, since + limit - time.monotonic()))
            except queue.Empty:
                break
            had_errors = bool(self.errors)
            yield from self._taken(rank, message)
            if not self.errors or not had_errors:
                since = time.monotonic()
        self._raise_failures()

    def _local_items(self) -> Iterator[tuple[int, Any]]:
        self.job._executing.add(self.serial)
        try:
            for item in self.local or ():
                yield 0, item
                while not self.inbox.empty():
                    yield from self._taken(*self.inbox.get())
            deque(self.fed or (), maxlen=0)  # what this rank did not draw, the others wait for
        except Exception as error:
            self.errors[0] = error
            if self.fed is not None:
                self.job._tell(Message("cut"), sorted(self.pending))
        finally:
            self.job._executing.discard(self.serial)

    def _taken(self, rank: int, message: Message) -> Iterator[tuple[int, Any]]:
        if message.do == "item":
            yield rank, message.body
            return
        if rank not in self.pending:
            return
        self.pending.discard(rank)
        if message.do == "gone":
            self.dead.add(rank)
            died = self.job._died(rank, f"in '{self.what}'")
            # One that this rank has ended is not the cause.
            self.errors[rank] = BrokenCollectiveError(str(died)) if self.job.ended is not None else died
        elif message.do == "error":
            body = message.body
            error = decode_error(body, self.job.who(rank))
            error.__cause__ = ClusterError(f"the worker's own traceback: {body['traceback']}")
            self.errors[rank] = error

    def _raise_failures(self) -> None:
        """Raise what went wrong. Ranks that may have come apart are ended."""
        self.job._inboxes.pop(self.serial, None)
        self.job._shared.pop(self.serial, None)
        if self.pending or self.errors:
            is_broken = bool(self.dead) or not (self.is_independent or len(self.errors) == self.count)
            raise_cause(self.job, self.errors, self.pending, self.what, is_broken)


class _Serving:
    """A rank that is not the driver: it carries out one order after another."""

    def __init__(self, worker: RankWorker, group: Any) -> None:
        self.worker = worker
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.link = Link(group, 0, self._deliver)
        self.doing = "waiting for orders"
        self.is_ending = False

    def run(self) -> NoReturn:
        """Until the driver ends; the process ends with it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the driver too
            signal.signal(signal.SIGTERM, self._forward)
        about = {"labels": registry.labels, "host": socket.gethostname(), "pid": os.getpid()}
        self.link.send(Message.of("hello", body=about))
        self.link.open()
        while (message := self.inbox.get()).do != "end":
            if message.do in ("make", "run", "order"):
                self._carry_out(message)
        self._leave_with_driver(bool(message.tree))

    def _carry_out(self, message: Message) -> None:
        try:
            for item in self._items(message):
                if message.answers:
                    self.link.send(Message.of("item", message.serial, item))
            ended = Message("end", message.serial)
        except Exception as error:
            trace = f"{who()}, {self.doing}:\n{''.join(traceback.format_exception(error))}"
            ended = Message.of("error", message.serial, {**encode_error(error), "traceback": trace})
        finally:
            self.doing = "waiting for orders"
        try:
            self.link.send(ended)
        except ClusterError:  # the driver is gone: the reading thread says so
            self.link.reader.join(_LEAVING)
            _leave(1)

    def _items(self, message: Message) -> Iterator[Any]:
        body = message.body
        if message.do == "make":
            self.doing = f"start of {body[2].role}"
            self.worker.make(*body)
        elif message.do == "run":
            function, args = body
            self.doing = f"in {getattr(function, '__name__', function)}"
            yield self.worker.run(function, args)
        else:
            key, method, args, kwargs, has_stream, batch = body
            self.doing, stream = f"in '{method}'", self._stream()
            first = [stream] if has_stream else [] if batch is None else [batch]
            yield from self.worker.execute(key, method, (*first, *args), kwargs)
            if has_stream:
                deque(stream, maxlen=0)

    def _stream(self) -> Iterator[Any]:
        """The items that the driver sends after an order."""
        while (message := self.inbox.get()).do == "item":
            yield message.body
        if message.do != "last":
            raise ClusterError(f"{who()}: the driver did not finish the stream it was sending")

    def _deliver(self, message: Message) -> None:
        """Called by the reading thread, so that a rank which is busy or stuck ends too."""
        if message.do == "exit":
            _leave(0)
        elif message.do == "gone":
            if self.is_ending:
                return
            where = f"{who()}, {self.doing}"
            sys.stderr.write(f"ClusterError: {where}: rank 0, which runs the script, died: {message.tree}\n")
            _leave(1)
        elif message.do == "stacks":
            self.link.send(Message("stacks", 0, tree=stacks()))
        else:
            self.is_ending = message.do == "end"
            self.inbox.put(message)
            if self.is_ending:
                _after(_LEAVING + GRACE, _leave, 1)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """A signal is for the driver. The code that it interrupts may be sending, so that another thread sends it."""
        threading.Thread(target=self.link.try_to_send, args=(Message("signal", tree=number),), daemon=True).start()

    def _leave_with_driver(self, failed: bool) -> NoReturn:
        self.link.close()
        self.link.try_to_send(Message("bye"))
        if failed:  # torchrun takes the first process that fails for the cause: that is the driver
            self.link.reader.join(_LEAVING)
        _leave(int(failed))


def _after(seconds: float, function: Callable[..., Any], *args: Any) -> None:
    """Call a function later, unless this process has ended by then."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()


def _leave(code: int) -> NoReturn:
    """End this process from any thread, without what the script would do at its end."""
    _after(_LEAVING, os._exit, code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _first_difference(ours: Sequence[str], theirs: Sequence[str], rank: int) -> str | None:
    for number, (mine, other) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="nothing")):
        if mine != other:
            return (
                f"ranks 0 and {rank} made different handles before the first call: number {number} is {mine} on rank "
                f"0 and {other} on rank {rank}. Make the same handles in the same order on every rank; what must "
                "happen once belongs after the first call, where only rank 0 runs the script"
            )
    return None


_job: TorchrunJob | None = None


def torchrun_job(timeout: float | None, kind: str) -> TorchrunJob:
    """This torchrun job, one object a process; until it has started, the latest arguments count.

    Args:
        timeout: None: as it is.
        kind: "cpu" or "cuda".
    """
    global _job
    if _job is None:
        _job = TorchrunJob()
    if not _job.has_started:
        _job.timeout, _job.kind = _job.timeout if timeout is None else timeout, kind
    return _job
