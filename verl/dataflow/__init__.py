"""When things run: the graph of nodes, its one executor, and the ways to write a graph."""

from verl.dataflow.symbols import advantages, experience, prompts, responses, updates

__all__ = ["advantages", "experience", "prompts", "responses", "updates"]
