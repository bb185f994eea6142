"""Ranks of a torchrun job: rank 0 drives, the others carry out its commands.

Reading order: `transport`, `worker_loop`, `link`, `codec`, `meeting`.
"""
