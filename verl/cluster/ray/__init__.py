"""Ranks as Ray actors.

Reading order: `transport`, `rank`, `pool`.
"""
