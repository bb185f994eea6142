"""Ranks of a torchrun job: one controller, the others serve it.

Reading order: `controller`, `meeting`, `codec`, `link`.
"""
