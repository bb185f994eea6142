"""The loop of ranks other than 0 in a torchrun job: from the first call on they carry out commands, one by one."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from verl._host.ranks import registry, who
from verl.cluster.rank_worker import RankWorker, stacks
from verl.cluster.torchrun.link import Link, Message
from verl.cluster.transport import GRACE, after
from verl.errors import ClusterError

#: Seconds for the threads of a link at the end of the process.
LEAVING = 5.0
_IDLE = "waiting for commands"


class WorkerLoop:
    """Carries out the commands of rank 0, which is the driver."""

    def __init__(self, worker: RankWorker, group: Any) -> None:
        self.worker = worker
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.link = Link(group, 0, self._deliver)
        self.doing = _IDLE
        self.is_ending = False

    def run(self) -> NoReturn:
        """Carry out commands until the driver ends, then exit."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the driver too
            signal.signal(signal.SIGTERM, self._forward)
        about = {"labels": registry.labels, "host": socket.gethostname(), "pid": os.getpid()}
        self.link.send(Message.of("hello", body=about))
        self.link.open()
        while (message := self.inbox.get()).do != "end":
            if message.do == "command":
                self._carry_out(message)
        self.link.closed.set()
        self.link.try_to_send(Message("bye"))
        if message.tree:  # torchrun takes the first process that fails for the cause: that is the driver
            self.link.reader.join(LEAVING)
        _leave(int(message.tree))

    def _carry_out(self, message: Message) -> None:
        try:
            what, method, args, is_stream, first = message.body
            self.doing = f"in '{what}'"
            first = self._stream() if is_stream else first
            for item in self.worker.carry_out(method, args, message.answers, None, first):
                self.link.send(Message.of("item", message.serial, item))
            ended = Message("end", message.serial)
        except Exception as error:
            trace = f"{who()}, {self.doing}:\n{''.join(traceback.format_exception(error))}"
            args = [arg for arg in error.args if isinstance(arg, str)]
            text = args[0] if len(args) == len(error.args) == 1 else str(error)
            about = {"type": type(error).__name__, "text": text, "traceback": trace}
            ended = Message.of("error", message.serial, about)
        finally:
            self.doing = _IDLE
        try:
            self.link.send(ended)
        except ClusterError:  # the driver is gone: the reading thread says so
            self.link.reader.join(LEAVING)
            _leave(1)

    def _stream(self) -> Iterator[Any]:
        """The items that the driver sends after a command."""
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
            self.link.send(Message.of("item", message.serial, stacks()))
        else:
            self.is_ending = message.do == "end"
            self.inbox.put(message)
            if self.is_ending:
                after(LEAVING + GRACE, _leave, 1)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the driver, from another thread: the interrupted code may hold the link's lock."""
        threading.Thread(target=self.link.try_to_send, args=(Message("signal", tree=number),), daemon=True).start()


def _leave(code: int) -> NoReturn:
    """End this process from any thread, without what the script would do at its end."""
    after(LEAVING, os._exit, code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
