"""What `no_waits` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.waits import no_waits, unwatched


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.tensor(0.0)),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_waits_are_found(wait: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(3.0)
    with no_waits():
        (x * 2).clamp(max=x.sum()).index_select(0, torch.tensor([1]))
        unwatched(wait)(x.clone())
        with pytest.raises(AssertionError, match="makes the host wait"):
            wait(x)
