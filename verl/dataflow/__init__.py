"""When things run: the graph of nodes, its one executor, and what users write a graph with.

Reading order: `graph`, `nodes`, `executor`, `calls`, `loop`, `scores`, `stages`, `symbols`,
`schedule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.dataflow.symbols import advantages, experience, prompts, responses, updates

__all__ = ["advantages", "experience", "prompts", "responses", "updates"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'verl.dataflow' has no attribute '{name}'")
    from verl.dataflow import symbols  # what only an expression of a step needs

    return getattr(symbols, name)
