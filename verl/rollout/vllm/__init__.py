"""vLLM as an engine, in its own processes.

Reading order: `engine`, `worker`, `weights`, `transport`.
"""
