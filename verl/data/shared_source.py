"""One source of rows for several streams."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from verl.data.prompts import PromptStream

DataT = TypeVar("DataT")


def read_once(data: Mapping[str, DataT]) -> dict[str, DataT]:
    """The same data, but a source that several of the streams have is read once for all of them. Iterators over one
    source may share a cursor, so that each row would reach one of them alone."""
    counts = Counter(id(stream.source) for stream in data.values() if isinstance(stream, PromptStream))
    shared: dict[int, SharedSource] = {}
    streams = dict(data)
    for name, stream in data.items():
        if isinstance(stream, PromptStream) and counts[id(stream.source)] > 1:
            source = shared.setdefault(id(stream.source), SharedSource(stream.source))
            streams[name] = replace(stream, source=source.reader())
    return streams


class SharedSource:
    """What one reader has read and the others have not waits for them. One that begins an epoch lets the present one be
    read to its end first."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source, self._lock = source, threading.Lock()
        self._readers: list[_Reader] = []
        self._epoch = -1
        self._rows: Iterator[Any] = iter(())
        self._receiving: list[_Reader] = []

    def reader(self) -> _Reader:
        self._readers.append(_Reader(self))
        return self._readers[-1]

    def rows(self, reader: _Reader, epoch: int) -> Iterator[Any]:
        """All rows of an epoch, from the first."""
        with self._lock:
            if epoch in reader.begun:  # once more, and not also what is left of the last time
                self._receiving = [each for each in self._receiving if each is not reader or epoch != self._epoch]
                del reader.waiting[epoch]
            if epoch not in reader.waiting:
                self._begin(epoch, reader)
            reader.begun.add(epoch)
            waiting = reader.waiting[epoch]
        while waiting or self._read(waiting, epoch):
            yield waiting.popleft()

    def _begin(self, epoch: int, reader: _Reader) -> None:
        while self._next():
            pass
        self._epoch = epoch
        self._receiving = [each for each in self._readers if epoch not in each.waiting and each.epoch <= epoch]
        for each in self._receiving:
            each.waiting[epoch] = deque()
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        self._rows = iter(self._source)

    def _read(self, waiting: deque[Any], epoch: int) -> bool:
        """Read on until a row has come; False: the epoch has no more."""
        with self._lock:
            while not waiting and epoch == self._epoch and self._next():
                pass
            return bool(waiting)

    def _next(self) -> bool:
        if not self._receiving:
            return False
        try:
            row = next(self._rows)
        except StopIteration:
            return False
        for reader in self._receiving:
            reader.waiting[self._epoch].append(row)
        return True


class _Reader:
    """The source of one stream.

    Attributes:
        begun: epochs whose first row it has asked for.
        waiting: rows that it has not read yet, by epoch.
    """

    def __init__(self, shared: SharedSource) -> None:
        self._shared, self.epoch = shared, 0
        self.begun: set[int] = set()
        self.waiting: dict[int, deque[Any]] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._shared.rows(self, self.epoch)
