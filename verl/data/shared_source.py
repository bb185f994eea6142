"""One source of rows for several streams."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import tee
from typing import Any, TypeVar

from verl.data.prompts import PromptStream

DataT = TypeVar("DataT")
_END = object()


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
        #: Its epoch, and the readers that have it: all read copies of one iterator.
        self._latest: tuple[int, list[_Reader]] = (-1, [])

    def reader(self) -> _Reader:
        self._readers.append(_Reader(self))
        return self._readers[-1]

    def rows(self, reader: _Reader, epoch: int) -> Iterator[Any]:
        """All rows of an epoch, from the first."""
        with self._lock:
            if epoch in reader.begun:  # once more, and not also what is left of the last time
                del reader.passes[epoch]
            if epoch not in reader.passes:
                self._begin(epoch)
            reader.begun.add(epoch)
            rows = reader.passes[epoch]
        while (row := self._next(rows)) is not _END:
            yield row

    def _begin(self, epoch: int) -> None:
        last, readers = self._latest
        for unread in [each.passes[last] for each in readers if last in each.passes][:1]:
            deque(copy(unread), maxlen=0)
        readers = [each for each in self._readers if epoch not in each.passes and each.epoch <= epoch]
        self._latest = (epoch, readers)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        for each, rows in zip(readers, tee(self._source, len(readers)), strict=True):
            each.passes[epoch] = rows

    def _next(self, rows: Iterator[Any]) -> Any:
        with self._lock:
            return next(rows, _END)


class _Reader:
    """The source of one stream.

    Attributes:
        begun: epochs whose first row it has asked for.
        passes: by epoch its rows, from the first that it has not read.
    """

    def __init__(self, shared: SharedSource) -> None:
        self._shared, self.epoch = shared, 0
        self.begun: set[int] = set()
        self.passes: dict[int, Iterator[Any]] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._shared.rows(self, self.epoch)
