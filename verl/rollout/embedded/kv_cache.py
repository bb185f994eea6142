"""The paged KV cache: memory layout, reference counts of blocks, prefix caching and eviction.

A block holds some tokens of all layers; how many is up to the device. Blocks are reference-counted: samples of a prompt
share its blocks, prompts share the blocks of a common prefix. A full prompt block without users stays cached under the
hash of all tokens up to its end, until its memory is needed (least recently used first) or the weights change. Blocks
of a turn of an episode stay too, its response and partial blocks included: a prompt that begins with a part of such a
block copies it (the partial-block prefix cache: `cache_prefix`, `longest_partial`).

In general a layer is a pool of blocks `[N, B, K, D]`, as `torch.nn.attention.varlen.varlen_attn` reads it. For the
CPU kernels keys are transposed within a block, so that products with keys and with values read memory in order. In
bf16 two rows are interleaved, because processors multiply bf16 in pairs.

Legend: L layers, N blocks, B tokens of a block, K key/value heads, D head size, P interleaved rows (2 in bf16, else 1),
W the head size padded to a multiple of 16.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from itertools import accumulate, takewhile
from operator import and_, eq, itemgetter

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.kernels.compiled import kernels

BLOCK = 32  # tokens of a block on CPU, as in paged_attention.cpp
_FLASH_BLOCK = 256  # what flash attention reads
_WIDTH = 16  # as in paged_attention.cpp


def block_tokens(device: torch.device) -> int:
    """How many tokens of a block the kernels for a device of this kind read best."""
    return _FLASH_BLOCK if device.type == "cuda" else BLOCK


def blocks_for(tokens: int, size: int = BLOCK) -> int:
    """Blocks of `size` tokens that hold this many."""
    return -(-tokens // size)


@dataclass(eq=False)
class KVCache:
    """Storage and book-keeping of N blocks.

    Args:
        compiled: lay keys and values out for the CPU kernels, where there are some.

    Attributes:
        block: tokens of a block; the kernels for the CPU have 32.
        nbytes: memory of the blocks while awake.
        keys, values: `[L, N, B, K, D]`, or for kernels `[L, N, K, D / P, B, P]` and `[L, N, K, B / P, W, P]`; absent
            while asleep.
        kernels: those that the layout is for, if any.
        filled: for each block whether it holds the keys and values of its prompt; set by the user of the block.
    """

    num_blocks: int
    num_layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    compiled: InitVar[bool] = True
    block: int = BLOCK

    def __post_init__(self, compiled: bool) -> None:
        size = self.block_bytes(self.num_layers, self.heads, self.head_dim, self.dtype, self.block)
        self.nbytes = self.num_blocks * size
        self.kernels = kernels(self.dtype, self.device) if compiled else None
        self.clear()
        self.allocate()

    @staticmethod
    def block_bytes(num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype, size: int = BLOCK) -> int:
        pair = 2 if dtype == torch.bfloat16 else 1
        widths = blocks_for(head_dim, pair) * pair + blocks_for(head_dim, _WIDTH) * _WIDTH
        return num_layers * num_heads * size * widths * dtype.itemsize

    def allocate(self) -> None:
        """Allocate the memory. On CPU pages are committed at the first write, low block numbers first.

        Raises:
            RolloutError: there is not so much.
        """
        shapes: list[tuple[int, ...]] = [(self.block, self.heads, self.head_dim)] * 2
        if self.kernels is not None:
            pair, width = 2 if self.dtype == torch.bfloat16 else 1, blocks_for(self.head_dim, _WIDTH) * _WIDTH
            keys, values = (blocks_for(self.head_dim, pair), self.block, pair), (self.block // pair, width, pair)
            shapes = [(self.heads, *keys), (self.heads, *values)]
        try:
            self.keys, self.values = map(self._empty, shapes)
        except (OSError, RuntimeError) as error:  # of mmap, of torch
            raise RolloutError(
                f"a KV cache of {self.nbytes / 1e9:.3g} GB cannot be allocated on {self.device} ({error}): lower "
                "rollout.kv_cache_gb"
            ) from error
        self.asleep = False

    def _empty(self, block: tuple[int, ...]) -> Tensor:
        shape = (self.num_layers, self.num_blocks + (self.kernels is None), *block)
        if self.device.type != "cpu" or not self.num_blocks or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        # Blocks are read in any order; large pages keep address translation cheap.
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel that has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def release(self) -> None:
        """Free the memory and clear the cache."""
        self.clear()
        self.keys = self.values = torch.empty(0)
        self.asleep = True

    def clear(self) -> None:
        """Forget all contents and all users."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._users = [0] * self.num_blocks
        self.filled = [False] * self.num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks without users, least recently used first
        # The partial-block prefix cache: a block's tokens with the digest of all tokens before them, and the blocks of
        # each such digest.
        self._partial: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._after: defaultdict[bytes, list[int]] = defaultdict(list)

    @property
    def available(self) -> int:
        """Blocks that an allocation can have, idle cached ones included."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one user; None if there are too few, then nothing is taken."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def take_prompt(self, tokens: Sequence[int]) -> list[int] | None:
        """Blocks for a prompt, which shares those of a known prefix; None, and nothing taken, if too few are free."""
        hashes = prefix_digests(tokens, self.block)[1:]
        shared = [self._by_hash[digest] for digest in takewhile(self._by_hash.__contains__, hashes)]
        idle = sum(block in self._idle for block in shared)
        needed = blocks_for(len(tokens), self.block) - len(shared)
        if needed > self.available - idle:
            return None
        for block in shared:
            self._users[block] += 1
            self._idle.pop(block, None)
        fresh = [self._take_one() for _ in range(needed)]
        for digest, block in zip(hashes[len(shared) :], fresh, strict=False):
            # A later block of the chain may still be known where an earlier one was evicted.
            if digest not in self._by_hash:
                self._by_hash[digest] = block
                self._hash_of[block] = digest
        return shared + fresh

    def cache_prefix(
        self, tokens: Sequence[int], blocks: Sequence[int], digests: Sequence[bytes], start: int, end: int
    ) -> None:
        """Cache a sequence's tokens `start` to `end` for prompts that begin with them, the last partial block too.

        Args:
            tokens: of the sequence, from its beginning.
            digests: their `prefix_digests`.
        """
        for index in range(start // self.block, blocks_for(end, self.block)):
            block, rows = blocks[index], tuple(tokens[index * self.block : min(end, (index + 1) * self.block)])
            if len(rows) == self.block:
                if self._by_hash.setdefault(digests[index + 1], block) != block:
                    continue
                self._hash_of[block], self.filled[block] = digests[index + 1], True
            if block not in self._partial:
                self._after[digests[index]].append(block)
            elif len(rows) < len(self._partial[block][1]):
                continue
            self._partial[block] = digests[index], rows

    def longest_partial(self, digest: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """`(block, rows)`: the cached block after this prefix that begins with the most of these tokens, and how many
        they are."""
        alike = (
            (block, sum(accumulate(map(eq, self._partial[block][1], tokens), and_)))
            for block in self._after.get(digest, ())
        )
        return max(alike, key=itemgetter(1), default=(0, 0))

    def drop(self, blocks: Sequence[int]) -> None:
        """Remove one user of these blocks."""
        # From the end: idle blocks are evicted in the order in which they come here, and a prefix is of use only as far
        # as its first block that is gone.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] < 0:
                raise RolloutError(f"KV block {block} was given back twice")
            if self._users[block]:
                continue
            if block in self._partial or (self.filled[block] and block in self._hash_of):
                self._idle[block] = None
            else:
                self._forget(block)
                self._free.append(block)

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        self.filled[block] = False
        return block

    def _forget(self, block: int) -> None:
        if block in self._hash_of:
            del self._by_hash[self._hash_of.pop(block)]
        if block in self._partial:
            prefix, _ = self._partial.pop(block)
            self._after[prefix].remove(block)
            if not self._after[prefix]:
                del self._after[prefix]


def prefix_digests(tokens: Sequence[int], size: int) -> list[bytes]:
    """For each number of full blocks, from none on, the hash of all tokens in them."""
    running = hashlib.blake2b(digest_size=16)
    digests = [running.digest()]
    for start in range(0, len(tokens) - size + 1, size):
        running.update(array("q", tokens[start : start + size]).tobytes())
        digests.append(running.digest())
    return digests
