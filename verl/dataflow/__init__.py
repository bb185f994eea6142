"""When things run: the graph of nodes, its one executor, and what users write a graph with.

Reading order: `graph`, `nodes`, `executor`, `calls`, `loop`, `scores`, `symbols`,
`schedule`.
"""

from verl._base.later import later

__all__ = ["advantages", "experience", "prompts", "responses", "updates"]
#: An expression of a step alone needs them.
HOMES = dict.fromkeys(__all__, "verl.dataflow.symbols")
__getattr__ = later(__name__, HOMES)
