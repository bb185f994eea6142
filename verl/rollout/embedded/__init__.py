"""The embedded engine: a scheduler makes a batch, a runner computes it, responses take the tokens.

Reading order: `engine`, `scheduler`, `runner`, `response`, `sampler`, `kv_cache`, `attention`.
"""
