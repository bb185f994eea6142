"""The embedded engine: sampler, paged cache, runner.

Reading order: `engine`, `response`, `runner`, `decode`, `sampler`, `kv_cache`, `attention`.
"""
