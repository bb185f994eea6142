"""A rank's part of a checkpoint: its shards of a role's tensors. A shard that several ranks hold is written once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl._base.durable import seal_all
from verl.errors import CheckpointError
from verl.training.ranks import gather_json
from verl.weights.shard import Shard, Stream
from verl.weights.tensor_files import write_shards


class RankFiles:
    """Files that this rank of a group writes into a directory; the other ranks of the group write theirs.

    Args:
        parts: this rank's shards, the same each time they are drawn, by the stem of their files.
        group: torch's; None for a rank alone.
        background: write in a thread, from a copy of the shards in host memory.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Iterable[Shard]], group: Any, *, background: bool) -> None:
        self._folder, self._group = folder, group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._result: dict[str, Any] | None = None
        shares = {stem: own_share(shards, group) for stem, shards in parts.items()}
        #: Of the tensors of all ranks, by stem.
        self.names = {stem: names for stem, (_, names) in shares.items()}
        share = {stem: shards for stem, (shards, _) in shares.items()}
        self._thread: threading.Thread | None = None
        if not background:
            self._write(share)
            return
        copies = {
            stem: [replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True)) for shard in shards]
            for stem, shards in share.items()
        }
        self._thread = threading.Thread(target=self._write, args=(copies,), name="verl-checkpoint")
        self._thread.start()

    def gathered(self, wait: bool) -> list[dict[str, Any]] | None:
        """The result of every rank: {"files": digests and sizes by name}, or {"error": text}, with the "errno" and
        "file" of an `OSError`. None: some are not written yet, and `wait` is false."""
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
        results = gather_json(self._result, self._group)
        return None if None in results else results

    def _write(self, parts: Mapping[str, Iterable[Shard]]) -> None:
        try:
            if not self._folder.is_dir():
                raise CheckpointError(
                    f"there is no {self._folder} on host {socket.gethostname()}: checkpoints lie on a file system that "
                    "all ranks share"
                )
            self._result = {"files": seal_all(self._written(parts), self._folder)}
        except OSError as error:
            self._result = {"error": error.strerror or str(error), "errno": error.errno, "file": error.filename}
        except CheckpointError as error:
            self._result = {"error": str(error)}
        except Exception as error:
            self._result = {"error": f"rank {self._rank}: {type(error).__name__}: {error}"}
            raise

    def _written(self, parts: Mapping[str, Iterable[Shard]]) -> Iterator[Path]:
        for stem, shards in parts.items():
            try:
                yield from write_shards(self._folder / f"{stem}-{self._rank}", shards)
            except CheckpointError as error:
                raise CheckpointError(f"{self._folder.name}/{stem}: {error}") from None


def own_share(shards: Iterable[Shard], group: Any) -> tuple[Iterable[Shard], set[str]]:
    """The shards that this rank writes, and the names of all. Each shard is written once, by the holder that has the
    least to write so far."""
    # A map and a filter let go of a shard before the next one is made; a generator expression would not.
    held = filter(lambda shard: shard.nbytes or shard.is_whole, shards)
    of_all = gather_json([*map(attrgetter("name", "offset", "nbytes"), held)], group)
    holders: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    for rank, entries in enumerate(of_all):
        for name, offset, size in entries:
            holders.setdefault((name, tuple(offset), size), []).append(rank)
    load, mine = [0] * len(of_all), set()
    for (name, offset, size), ranks in holders.items():
        writer = min(ranks, key=load.__getitem__)
        load[writer] += size
        if group is None or writer == dist.get_rank(group):
            mine.add((name, offset))
    share = Stream(lambda: filter(lambda shard: (shard.name, shard.offset) in mine, shards))
    return share, {name for name, *_ in holders}
