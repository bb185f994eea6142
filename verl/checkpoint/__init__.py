"""Checkpoints: the store, the state in them, when one is written.

Reading order: `store`, `state`, `saving`, `automatic`, `rng`.
"""
