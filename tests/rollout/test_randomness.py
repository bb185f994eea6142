from __future__ import annotations

import numpy as np

from verl.rollout.embedded.sampler import stream_key, uniforms


def test_the_generator_is_splitmix64() -> None:
    # First outputs of SplitMix64 from state 1234567, as published with the reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert (uniforms([1234567] * 4, [0, 1, 2, 3]) * 2**53).astype(np.uint64).tolist() == [x >> 11 for x in expected]


def test_keys_are_the_same_on_every_platform_and_differ_by_seed_and_id() -> None:
    assert stream_key(0, "prompt/0") == stream_key(0, "prompt/0")
    keys = {stream_key(seed, f"p{i}/{j}") for seed in (-1, 0, 1) for i in range(20) for j in range(20)}
    assert len(keys) == 3 * 400
    assert stream_key(1, "2") != stream_key(12, "")
    assert stream_key(0, "lone surrogate \ud800") >= 0


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    keys = [stream_key(3, str(i)) for i in range(50)]
    together = uniforms(keys, list(range(50)))
    assert together.tolist() == [uniforms([key], [i])[0] for i, key in enumerate(keys)]


def test_numbers_are_uniform_along_a_stream_and_across_streams() -> None:
    along = uniforms([stream_key(0, "x")] * 100_000, list(range(100_000)))
    across = uniforms([stream_key(0, str(i)) for i in range(100_000)], [0] * 100_000)
    for numbers in (along, across):
        assert 0 <= numbers.min() <= numbers.max() < 1
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is the 0.1 % point.
        distance = np.abs(np.sort(numbers) - (np.arange(100_000) + 0.5) / 100_000).max()
        assert distance < 1.95 / np.sqrt(100_000)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015
