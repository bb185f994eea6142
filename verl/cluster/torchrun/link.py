"""Messages between rank 0 of a torchrun job and another rank, over a gloo group of torch's."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.cluster.torchrun.codec import decode, encode
from verl.cluster.torchrun.meeting import joining
from verl.errors import BrokenCollectiveError, ClusterError

logger = logging.getLogger(__name__)

#: Seconds without a message after which the other rank is taken for dead. A process that ends is noticed at once.
SILENCE = 60.0
#: Seconds between two heartbeats.
_BEAT = 5.0
#: Bytes that are sent at once at most.
_CHUNK = 64 << 20


@dataclass(frozen=True)
class Message:
    """A message between two ranks.

    Attributes:
        do: its kind, such as "command"; `Link` itself sends "beat", "bye" and "gone".
        serial: the number of its call.
        answers: whether the result of a command is sent back.
        tree, buffers: its value as JSON, and the tensors that the JSON refers to (see `codec`).
    """

    do: str
    serial: int = 0
    answers: bool = False
    tree: Any = None
    buffers: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, do: str, serial: int = 0, body: Any = None, answers: bool = False) -> Message:
        buffers: list[torch.Tensor] = []
        return cls(do, serial, answers, encode(body, buffers), buffers)

    @property
    def body(self) -> Any:
        """The decoded value."""
        return decode(self.tree, self.buffers)


def control_group(rank: int, size: int, timeout: float) -> Any:
    """The gloo group that messages go through, made by all ranks. It is not one of `torch.distributed`'s own, so that a
    script may call `destroy_process_group` at its end.

    Args:
        timeout: of calls, in seconds. If it is shorter than `SILENCE`, the other rank may be silent for this long only,
            though for three heartbeats in any case.
    """
    store = dist.PrefixStore("verl/control", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    silence = timedelta(seconds=min(SILENCE, max(timeout, 3 * _BEAT)))
    with joining(store, rank, size, "the control group"):
        return dist.ProcessGroupGloo(store, rank, size, silence)


class Link:
    """This rank's end of the messages to and from `peer`. A thread reads them as they come, another one sends a
    heartbeat every few seconds.

    Args:
        deliver: called with each message by the reading thread, and with one `Message("gone", ...)` at most, when the
            other rank has died or was silent for too long.
    """

    def __init__(self, group: Any, peer: int, deliver: Callable[[Message], None]) -> None:
        self._group, self.peer, self._deliver = group, peer, deliver
        self._lock = threading.Lock()
        #: Set, there are no more heartbeats.
        self.closed = threading.Event()
        self.reader = threading.Thread(target=self._read, name=f"verl-link-{peer}", daemon=True)
        self._beats = threading.Thread(target=self._beat, name=f"verl-beat-{peer}", daemon=True)

    def open(self) -> None:
        self.reader.start()
        self._beats.start()

    def send(self, message: Message) -> None:
        """Send a message, and wait until the other rank has it.

        Raises:
            BrokenCollectiveError: the other rank is gone.
        """
        about = {"do": message.do, "serial": message.serial, "answers": message.answers}
        sizes = [len(buffer) for buffer in message.buffers]
        head = json.dumps({**about, "tree": message.tree, "sizes": sizes}).encode()
        try:
            with self._lock:
                # A receiver of gloo has to know each size: the head's goes first, and the head has the buffers'.
                self._group.send([torch.tensor([len(head)])], self.peer, 0).wait()
                for buffer in (torch.frombuffer(bytearray(head), dtype=torch.uint8), *message.buffers):
                    for piece in buffer.split(_CHUNK) if len(buffer) else ():
                        self._group.send([piece], self.peer, 0).wait()
        except RuntimeError as error:
            raise BrokenCollectiveError(f"rank {self.peer} cannot be reached: {error}") from error

    def try_to_send(self, message: Message) -> None:
        """`send`, or nothing if the other rank is gone."""
        try:
            self.send(message)
        except ClusterError as error:
            logger.debug("%s: %s", message.do, error)

    def receive(self) -> Message:
        """The next message, for a caller that reads before `open`."""
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], self.peer, 0).wait()
        head = json.loads(self._bytes(int(size)).numpy().tobytes())
        buffers = [self._bytes(size) for size in head["sizes"]]
        return Message(head["do"], head["serial"], head["answers"], head["tree"], buffers)

    def _bytes(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        for piece in buffer.split(_CHUNK) if size else ():
            self._group.recv([piece], self.peer, 0).wait()
        return buffer

    def _read(self) -> None:
        try:
            while (message := self.receive()).do != "bye":
                if message.do != "beat":
                    self._deliver(message)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:  # of gloo, or no message of ours
            self.closed.set()
            self._deliver(Message("gone", tree=" ".join(str(error).split())))

    def _beat(self) -> None:
        while not self.closed.wait(_BEAT):
            try:
                self.send(Message("beat"))
            except ClusterError:
                return
