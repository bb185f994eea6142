"""Checkpoints: the store, the state in them, when one is written."""
