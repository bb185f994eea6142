"""Rotary embeddings that change with the length of a row."""

from __future__ import annotations

from typing import Any

# Beyond the original length the frequencies of these depend on the longest position in the batch.
_BATCH_DEPENDENT = ("dynamic", "longrope")


def original_length(config: Any) -> int | None:
    """The longest row whose embeddings do not depend on how long it, or a row beside it, is; None: no row's do."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) not in _BATCH_DEPENDENT:
        return None
    original = rope.get("original_max_position_embeddings")
    return original or getattr(config, "original_max_position_embeddings", None)
