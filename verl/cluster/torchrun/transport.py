"""Ranks that torchrun has started, seen from rank 0, which runs the script and its own part of each call.

All ranks run the script up to its first call. There they compare what they have registered. From then on only rank 0
runs the script, and the others are in their `worker_loop` until it ends, or rank 0 is gone.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl._host import ranks
from verl._host.ranks import local_ranks, rank_here, registry, torchrun_ranks
from verl.cluster.torchrun.codec import decode_error
from verl.cluster.torchrun.link import Link, Message, control_group
from verl.cluster.torchrun.worker_loop import LEAVING, WorkerLoop
from verl.cluster.transport import GRACE, STUCK, Command, Event, Transport, after, died
from verl.cluster.world import World
from verl.errors import BrokenCollectiveError, ClusterError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sent:
    """Commands on their way.

    Attributes:
        pending: ranks that have not ended.
        collective: they wait while this rank does not draw its own part.
        inbox: what they have sent.
    """

    serial: int
    what: str
    pending: set[int]
    collective: bool
    inbox: queue.SimpleQueue[tuple[int, Message]] = field(default_factory=queue.SimpleQueue)


class TorchrunTransport(Transport):
    """The ranks of this torchrun job; there is one a process. See `Transport`.

    Attributes:
        kind: "cpu" or "cuda".
    """

    def __init__(self) -> None:
        self.kind, self.size, self.devices_a_machine = "cpu", torchrun_ranks(), local_ranks()
        self._links: dict[int, Link] = {}
        self._about: dict[int, Mapping[str, Any]] = {}
        self._gone: dict[int, str] = {}
        self._lock = threading.RLock()  # commands reach all ranks in the order in which they are carried out here
        self._serials, self._sent = itertools.count(1), dict[int, _Sent]()

    def start(self) -> None:
        """Connect all ranks. On rank 0 it returns once all are connected, on another rank it never returns.

        Raises:
            ClusterError: the ranks have made other handles, or the same in another order.
        """
        with self._lock:
            if self.has_started:
                return
            local = os.environ.get("LOCAL_RANK", str(rank_here()))
            device = f"cuda:{local}" if self.kind == "cuda" else self.kind
            world = World(rank_here(), self.size, None, self.timeout, device)
            group = control_group(world.rank, world.size, self.timeout)
            self.worker, registry.is_closed, self.has_started = world, True, True
            if world.rank != 0:
                WorkerLoop(self.worker, group).run()
            self._meet(group, world)

    def _meet(self, group: Any, world: World) -> None:
        for rank in range(1, world.size):
            link = Link(group, rank, partial(self._deliver, rank))
            try:
                self._about[rank] = link.receive().body
            except RuntimeError as error:
                raise ClusterError(
                    f"rank {rank} of {world.size} died before the first call: it was silent ({error})"
                ) from error
            self._links[rank] = link
        for link in self._links.values():
            link.open()
        atexit.register(self._end, world)
        for rank, about in self._about.items():
            if (reason := _first_difference(registry.labels, about["labels"], rank)) is not None:
                self.close(reason)
                raise ClusterError(reason)

    def send(
        self, commands: Mapping[int, Command], what: str, first: Any = None, collective: bool = False
    ) -> tuple[_Sent, Any]:
        self.start()
        is_stream, serial, messages = isinstance(first, Iterator), next(self._serials), {}
        encoded = dict[tuple[int, int], Message]()
        for rank, (method, args, answers, rows) in commands.items():
            if rank in self._links:
                same = id(args), id(rows)  # several ranks may get the same
                if same not in encoded:
                    part = None if is_stream else first
                    if rows is not None and len(rows) < len(first):
                        part = first.take(rows)
                    encoded[same] = Message.of("command", serial, (what, method, args, is_stream, part))
                messages[rank] = replace(encoded[same], answers=answers)
        sent = _Sent(serial, what, {*messages}, collective)
        with self._lock:
            if what == "stacks":  # a rank that is stopped does not take it
                self._sent[serial] = sent
                for rank in messages:
                    self._tell(Message("stacks", serial), [rank], wait=0.0)
                return sent, None
            self._check_free(messages, what)
            self._sent |= {serial: sent} if messages else {}
            for rank, message in messages.items():
                try:
                    self._links[rank].send(message)
                except BrokenCollectiveError as error:  # before the reading thread has noticed
                    self._deliver(rank, Message("gone", tree=str(error)))
        return sent, self._fed(first, [*messages]) if is_stream else first

    def _check_free(self, ranks_: Iterable[int], what: str) -> None:
        if self.ended is not None:
            raise ClusterError(f"the ranks have been ended: {self.ended}")
        for rank in ranks_:
            if rank in self._gone:
                raise ClusterError(died(self.who(rank), "before this call", self._gone[rank]))
            for sent in self._sent.values():
                if sent.collective and rank in sent.pending:
                    raise ClusterError(
                        f"'{what}' was called while the stream of '{sent.what}' is open: its ranks are busy until it "
                        "ends. Exhaust the iterator or close() it first"
                    )

    def _fed(self, stream: Iterator[Any], to: Sequence[int]) -> Iterator[Any]:
        """Yield the stream's items, each after it was sent to the other ranks."""
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

    def receive(self, sent: _Sent, seconds: float) -> list[Event]:
        try:
            rank, message = sent.inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return []
        if message.do == "item":
            return [Event(rank, "item", message.body)]
        sent.pending.discard(rank)
        if not sent.pending:
            self._sent.pop(sent.serial, None)
        if message.do == "error":
            about = message.body
            error = decode_error(about["type"], about["text"], self.who(rank))
            error.__cause__ = ClusterError(f"the worker's own traceback: {about['traceback']}")
            return [Event(rank, "error", error)]
        return [Event(rank, message.do, message.tree)]

    def _deliver(self, rank: int, message: Message) -> None:
        """Called by the reading thread of a link."""
        if message.do == "signal":
            on_signal = ranks.on_signal or partial(os.kill, os.getpid())
            on_signal(int(message.tree))
            return
        waiting = [self._sent.get(message.serial)]
        if message.do == "gone":
            self._gone[rank] = str(message.tree)
            if self.ended is None:  # torchrun may end this process before it has raised the error
                logger.error("%s died: %s", self.who(rank), message.tree)
            waiting = [sent for sent in [*self._sent.values()] if rank in sent.pending]
        for sent in filter(None, waiting):
            sent.inbox.put((rank, message))
            if message.do in ("gone", "error"):
                after(GRACE, self._free, sent)

    def _free(self, sent: _Sent) -> None:
        if not sent.inbox.empty():  # this rank has not read of the failure since: see `transport._free`
            self.close(STUCK)

    def who(self, rank: int) -> str:
        about = self._about.get(rank, {"host": socket.gethostname(), "pid": os.getpid()})
        return f"rank {rank} of {self.size} (host {about['host']}, pid {about['pid']})"

    def close(self, reason: str = "close() was called") -> None:
        """End the other ranks, with exit code 0: only the script's own counts."""
        if self.ended is None:
            self.ended = reason
            self._tell(Message("exit"), list(self._links), wait=1.0)

    def _tell(self, message: Message, to: Sequence[int], wait: float = GRACE) -> None:
        """Send a message to ranks, for at most `wait` seconds: a stopped process does not receive it."""
        threads = [threading.Thread(target=self._links[rank].try_to_send, args=(message,), daemon=True) for rank in to]
        for thread in threads:
            thread.start()
        until = time.monotonic() + wait
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _end(self, world: World) -> None:
        """At exit of the script: end the other ranks, with exit code 1 if an error ended it."""
        # The interpreter keeps an exception that nothing caught here.
        failed = getattr(sys, "last_value", None) is not None
        self._tell(Message("end", tree=int(failed)), [rank for rank in self._links if rank not in self._gone])
        for link in self._links.values():
            link.closed.set()
            link.reader.join(LEAVING)
        world.leave()


def _first_difference(ours: Sequence[str], theirs: Sequence[str], rank: int) -> str | None:
    for number, (mine, other) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="nothing")):
        if mine != other:
            return (
                f"ranks 0 and {rank} made different handles before the first call: number {number} is {mine} on rank "
                f"0 and {other} on rank {rank}. Make the same handles in the same order on every rank; what must "
                "happen once belongs after the first call, where only rank 0 runs the script"
            )
    return None


#: The ranks of this torchrun job, one object a process.
this_job = functools.cache(TorchrunTransport)
