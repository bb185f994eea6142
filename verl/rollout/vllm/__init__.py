"""vLLM as an engine, in its own processes."""
