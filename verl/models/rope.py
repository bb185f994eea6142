"""Rotary embeddings that change with the length of a row, or with the positions that a model is said to have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Beyond the original length the frequencies of these depend on the longest position in the batch.
_BATCH_DEPENDENT = ("dynamic", "longrope")


def original_length(config: Any) -> int | None:
    """The longest row whose embeddings do not depend on the longest row of the batch; None: no row's do."""
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type")) not in _BATCH_DEPENDENT:
        return None
    original = rope.get("original_max_position_embeddings")
    return original or getattr(config, "original_max_position_embeddings", None)


def position_limits(config: Any, is_embedded: bool) -> Iterator[tuple[int, str]]:
    """Limits on the length of prompt plus response, each with its reason."""
    config = config.get_text_config()
    if limit := getattr(config, "max_position_embeddings", None):
        yield limit, ""
    if is_embedded and (original := original_length(config)):
        yield (
            original,
            " (original_max_position_embeddings) that do not depend on a row's length, and the embedded engine "
            "computes no others: rollout='hf' does",
        )


@contextmanager
def own_positions(config: Any) -> Iterator[None]:
    """Inside, the configuration of a model that was loaded with other positions has the positions of its files, for
    other readers; unless the model's outputs depend on them."""
    stored = vars(config).pop("stored_max_position_embeddings", None)
    if stored is None:
        yield
        return
    live, rope = config.max_position_embeddings, _rope(config)
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]  # of all layers, or kinds of layers
    # These are computed from `max_position_embeddings`.
    if {part.get("rope_type", part.get("type")) for part in kinds}.isdisjoint((*_BATCH_DEPENDENT, "yarn")):
        config.max_position_embeddings = stored
    try:
        yield
    finally:
        config.max_position_embeddings, config.stored_max_position_embeddings = live, stored


def _rope(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
