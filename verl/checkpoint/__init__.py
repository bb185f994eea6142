"""Checkpoints: the store, the state in them, when one is written.

Reading order: `directory`, `store`, `state`, `saving`, `automatic`, `rng`.
"""
