"""Rows that begin with the same tokens, as a tree: a node is a piece that several rows have, and is computed once.

Rows are compared within a family: samples of a prompt, trajectories of a group. A piece is shared from `LEAST` tokens
on, counted from the fork before it; the whole prompt of a row is shared whatever its length. So samples whose responses
begin alike by chance are computed as ever, and a node always saves more than a further row of attention costs.

Families stay together when rows are dealt to ranks and micro-batches; they are `joined` where they came to one
micro-batch, by a system prompt, tools or examples that their prompts have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

#: Fewest tokens past a fork, or past a prompt, that rows of a family share.
LEAST = 64
#: Fewest that families share. It may be less, since prompts do not begin alike by chance.
LEAST_BETWEEN = 16
#: The same on an accelerator, where it costs launches: gradients of a shared token's copies are added one by one.
LEAST_BETWEEN_ON_DEVICE = 256


class PrefixTree(NamedTuple):
    """Trees of the rows of a batch.

    Attributes:
        lengths: tokens of each node.
        paths: the nodes of each row, whose tokens together are the row; of two nodes of a path the first has the lower
            number.
    """

    lengths: Sequence[int]
    paths: Sequence[tuple[int, ...]]

    def take(self, rows: Iterable[int]) -> PrefixTree:
        return PrefixTree(self.lengths, [self.paths[row] for row in rows])

    def tokens(self, rows: Iterable[int]) -> int:
        """What these rows cost in one forward."""
        return sum([self.lengths[node] for node in {node for row in rows for node in self.paths[row]}])

    def trees(self, rows: Iterable[int]) -> list[list[int]]:
        """Rows by tree, depth first: rows that share a node are adjacent, else they keep their order."""
        first: dict[int, int] = {}
        trees: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for position, row in enumerate(rows):
            branch = (*[first.setdefault(node, position) for node in self.paths[row]], position)
            trees.setdefault(branch[0], []).append((branch, row))
        return [[row for _, row in sorted(tree)] for tree in trees.values()]

    def branches(self, rows: Iterable[int], depth: int) -> list[list[int]]:
        """Rows of a tree, depth first, by their nodes below the first `depth`: each is cut off at a fork."""
        parts: dict[int, list[int]] = {}
        for row in rows:
            path = self.paths[row]
            parts.setdefault(path[depth] if depth < len(path) else -1 - row, []).append(row)
        return list(parts.values())


def families(prompts: Sequence[Indices], groups: Sequence[Any] | None = None) -> list[int]:
    """Numbers for rows: equal for an equal prompt, else for the same group (None: the row is of none)."""
    numbers: list[int] = []
    number_of: dict[Any, int] = {}
    for prompt, group in zip(prompts, groups or [None] * len(prompts), strict=True):
        key = prompt.tobytes()
        numbers.append(number_of.get(key, number_of.get(("group", group), len(numbers))))
        number_of[key] = numbers[-1]
        if group is not None:
            number_of.setdefault(("group", group), numbers[-1])
    return numbers


def prefix_tree(
    rows: Sequence[Indices],
    prompts: Sequence[int],
    families: Sequence[int],
    least: float | None = None,
) -> PrefixTree:
    """The trees of rows.

    Args:
        rows: the tokens of each that are fed.
        prompts: how many of them are its prompt.
        families: of each row; different families share nothing.
        least: fewest tokens that they share past their prompts; None: `LEAST`.
    """
    fewest = LEAST if least is None else least
    lengths: list[int] = []
    paths: list[tuple[int, ...]] = [()] * len(rows)
    members: dict[int, list[int]] = {}
    for row, family in enumerate(families):
        members.setdefault(family, []).append(row)
    for family_rows in members.values():
        # Rows that begin alike are neighbours in the order of their bytes.
        ordered = sorted(family_rows, key=lambda row: rows[row].tobytes()) if len(family_rows) > 1 else family_rows
        common = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(ordered))]
        todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(ordered), 0, ())]
        while todo:  # rows `first` to `end` of the order, whose first `start` tokens are the nodes of `path`
            first, end, start, path = todo.pop()
            alike = min(common[first + 1 : end], default=len(rows[ordered[first]]))
            cut = _cut(start, alike, [prompts[row] for row in ordered[first:end]], fewest)
            if cut > start:
                path = (*path, len(lengths))
                lengths.append(cut - start)
            if end - first == 1:
                paths[ordered[first]] = path
                continue
            bounds = [first, *(n for n in range(first + 1, end) if common[n] == alike), end]
            todo += [(a, b, cut, path) for a, b in pairwise(bounds)]
    return PrefixTree(lengths, paths)


def joined(tree: PrefixTree, rows: Sequence[Indices], *, on_device: bool = False) -> PrefixTree:
    """The same trees of the same rows, with what their roots have in common, `LEAST_BETWEEN` tokens or more
    (`LEAST_BETWEEN_ON_DEVICE`), once."""
    least = LEAST_BETWEEN_ON_DEVICE if on_device else LEAST_BETWEEN
    roots = {path[0]: row[: tree.lengths[path[0]]] for path, row in zip(tree.paths, rows, strict=True)}
    above = prefix_tree([*roots.values()], [0] * len(roots), [0] * len(roots), least=least)
    root_paths, below = dict(zip(roots, above.paths, strict=True)), len(above.lengths)
    paths = [(*root_paths[path[0]], *[below + node for node in path[1:]]) for path in tree.paths]
    return PrefixTree([*above.lengths, *tree.lengths], paths)


def _cut(start: int, alike: int, prompts: Sequence[int], fewest: float) -> int:
    """How far a node from `start` reaches, of rows that have their first `alike` tokens in common."""
    if len(prompts) == 1:
        return alike
    known = max((prompt for prompt in prompts if start < prompt <= alike), default=start)
    return alike if alike - known >= fewest else known


def _common(a: Indices, b: Indices) -> int:
    """How many first tokens two rows have in common."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size
