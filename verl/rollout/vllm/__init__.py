"""vLLM as an engine, in its own processes.

Reading order: `engine`, `start`, `requests`, `worker`, `transport`.
"""
