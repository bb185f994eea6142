"""Transformers models: the packed forward, log-probs, value heads, loading, weights as shards, memory."""
