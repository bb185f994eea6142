"""When things run: the graph of nodes, its one executor, and the ways to write a graph."""
