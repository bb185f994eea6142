from __future__ import annotations

import random

import pytest
import torch

from verl.errors import RolloutError
from verl.rollout.embedded.kv_cache import BLOCK, KVCache, blocks_for


def make(blocks: int) -> KVCache:
    return KVCache(blocks, 1, 1, 8, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_cache_that_there_is_no_memory_for_is_named(compiled: bool) -> None:
    with pytest.raises(
        RolloutError, match=r"a KV cache of .* GB cannot be allocated on cpu .*: lower rollout.kv_cache_gb"
    ):
        KVCache(4, 1, 1, 1 << 44, torch.float32, torch.device("cpu"), compiled)


def filled(cache: KVCache, tokens: list[int]) -> list[int]:
    blocks = cache.take_prompt(tokens)
    assert blocks is not None
    for block in blocks[: len(tokens) // BLOCK]:
        cache.filled[block] = True
    return blocks


def test_prompts_share_the_blocks_of_a_common_beginning() -> None:
    cache = make(10)
    common = list(range(2 * BLOCK))
    first = filled(cache, [*common, 7])
    second = filled(cache, [*common, 8, 9])
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert cache.available == 10 - 4
    cache.drop(first)
    assert cache.available == 10 - 3
    cache.drop(second)
    assert cache.available == 10


def test_an_idle_prompt_is_found_again_until_its_room_is_needed() -> None:
    cache = make(4)
    old, new = list(range(2 * BLOCK)), list(range(100, 100 + 2 * BLOCK))
    first = filled(cache, old)
    cache.drop(first)
    second = filled(cache, new)
    cache.drop(second)
    assert cache.take_prompt(old) == first
    cache.drop(first)
    # The end of the least recently used prompt goes first: its beginning is of use to more prompts.
    taken = cache.take(1)
    assert taken == [second[1]]
    assert not cache.filled[second[1]]


def test_blocks_that_were_never_filled_are_not_kept() -> None:
    cache = make(4)
    blocks = cache.take_prompt(list(range(BLOCK)))
    assert blocks is not None
    cache.drop(blocks)
    assert cache.take_prompt(list(range(BLOCK))) is not None
    assert not cache.filled[blocks[0]]


def test_too_few_blocks_take_nothing() -> None:
    cache = make(3)
    held = filled(cache, list(range(BLOCK)))
    assert cache.take(3) is None
    assert cache.take_prompt([*range(BLOCK), *range(3 * BLOCK)]) is None
    assert cache.available == 2
    cache.drop(held)
    # An idle block that the prompt itself shares cannot also make room for it.
    assert cache.take_prompt([*range(BLOCK), *range(3 * BLOCK)]) is None
    assert cache.available == 3


def test_giving_back_twice_is_an_error() -> None:
    cache = make(2)
    blocks = cache.take(1)
    assert blocks is not None
    cache.drop(blocks)
    with pytest.raises(RolloutError, match="twice"):
        cache.drop(blocks)


def test_nothing_is_lost_or_shared_by_accident_over_random_use() -> None:
    rng = random.Random(0)
    cache = make(24)
    users: list[tuple[list[int], list[int] | None]] = []
    for _ in range(5000):
        if users and rng.random() < 0.5:
            cache.drop(users.pop(rng.randrange(len(users)))[0])
        elif rng.random() < 0.5:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(4))] * BLOCK + [5] * rng.randrange(BLOCK)
            blocks = cache.take_prompt(tokens)
            if blocks is not None:
                assert len(blocks) == blocks_for(len(tokens))
                for block in blocks[: len(tokens) // BLOCK]:
                    if rng.random() < 0.8:
                        cache.filled[block] = True
                users.append((blocks, tokens))
        else:
            blocks = cache.take(rng.randrange(4))
            if blocks is not None:
                users.append((blocks, None))
        held = {block for blocks, _ in users for block in blocks}
        assert cache.available == 24 - len(held)
        private = [block for blocks, tokens in users if tokens is None for block in blocks]
        shared = {block for blocks, tokens in users if tokens is not None for block in blocks}
        assert len(private) == len(set(private))
        assert not shared & set(private)
        content: dict[int, tuple[int, ...]] = {}
        for blocks, tokens in users:
            for i, block in enumerate(blocks if tokens is not None else []):
                beginning = tuple(tokens[: (i + 1) * BLOCK])
                assert content.setdefault(block, beginning) == beginning
    for blocks, _ in users:
        cache.drop(blocks)
    assert cache.available == 24
