"""The states of the process-wide random generators, as tensors and JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, Field

from verl._host import device
from verl.errors import CheckpointError


class RandomState(BaseModel, allow_inf_nan=False):
    """The state of the generators that is not in tensors."""

    python: tuple[int, float | None]
    #: NumPy's own check lets through a position that it then reads at.
    numpy: tuple[str, Annotated[int, Field(ge=0, le=624)], Annotated[int, Field(ge=0, le=1)], float]


def rng_state() -> tuple[dict[str, torch.Tensor], RandomState]:
    """State of torch (CPU and every accelerator), NumPy's global generator and `random`."""
    version, words, gauss = random.getstate()
    kind, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        **device.rng_states(),
    }
    return tensors, RandomState(python=(version, gauss), numpy=(str(kind), int(pos), int(has_gauss), float(cached)))


def set_rng_state(tensors: Mapping[str, torch.Tensor], meta: RandomState) -> None:
    """Set what `rng_state` gave. States of devices that this process lacks are left out.

    Raises:
        CheckpointError: the state is incomplete or of another kind of generator.
    """
    try:
        version, gauss = meta.python
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
        kind, pos, has_gauss, cached = meta.numpy
        np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), pos, has_gauss, cached))
        torch.set_rng_state(tensors["torch"].clone())
        device.set_rng_states(tensors)
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the state of the random generators cannot be restored: {error}") from error
