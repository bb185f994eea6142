"""Ranks as Ray actors.

Reading order: `controller`, `rank`, `pool`.
"""
