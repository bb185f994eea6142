"""Random numbers without state: token t of a sample gets a uniform that is a hash of (run seed, sample id, t).

So neither the batch a sample shares, nor preemption, resuming or the number of ranks can change it.
The generator is SplitMix64 (Steele, Lea, Flood 2014), jumped to its (t+1)-th output, started from a 64-bit
BLAKE2b key of seed and id; integer arithmetic only, so equal on every platform.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, sample_id: str) -> int:
    """The 64-bit key of a sample's stream."""
    digest = hashlib.blake2b(f"{seed}\0{sample_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """Number `steps[i]` of stream `keys[i]`, in [0, 1) with 53 random bits; `[N]`, `[N]` -> `[N]`."""
    counter = np.asarray(steps, np.uint64) + np.uint64(1)
    z = np.asarray(keys, np.uint64) + counter * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    fractions: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions
