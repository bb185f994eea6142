"""When things run: the graph of nodes, its one executor, and what users write a graph with.

Reading order: `graph`, `nodes`, `groups`, `columns`, `calls`, `result`, `loop`, `scores`, `stages`, `symbols`,
`schedule`.
"""

from verl.dataflow.symbols import advantages, experience, prompts, responses, updates

__all__ = ["advantages", "experience", "prompts", "responses", "updates"]
