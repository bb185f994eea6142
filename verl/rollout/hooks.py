"""Callbacks on a response while it is generated: logits processors and guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

#: A guard's decision on a response so far; None: it goes on.
Verdict = Literal["stop", "reject"] | None


class LogitsProcessor(Protocol):
    """Changes what may be sampled next. It belongs to one request, so it may keep state."""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Called once for each token of the response, in order.

        Args:
            tokens: the response so far; must not be changed.
            logits: `[V]`, fp32 or fp64, before temperature; may be changed in place.

        Returns:
            The logits `[V]` to sample from, minus infinity for excluded tokens (NaN and plus infinity are refused). If
            every token is excluded, the response ends with `finish="reject"`. Log-probs are of the unchanged
            logits.
        """


class Guard(Protocol):
    """Checks the text of responses while they are generated; requests that share a guard are checked in one call.

    Attributes:
        every: tokens between two checks of a response; it is also checked when it ends.
    """

    every: int

    def __call__(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """A verdict per text: "stop" ends the response as it is, "reject" ends it with `finish="reject"`."""
