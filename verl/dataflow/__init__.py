"""When things run: the graph of nodes, its one executor, and the ways to write a graph.

Reading order: `graph`, `nodes`, `executor`, `pieces`, `loop`, `scores`, `pipeline`, `stages`, `expression`,
`symbols`, `schedule`.
"""

from verl.dataflow.symbols import advantages, experience, prompts, responses, updates

__all__ = ["advantages", "experience", "prompts", "responses", "updates"]
