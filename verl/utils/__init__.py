"""Helpers that are useful beside training."""
