"""Ranks and how they are reached: placement, groups of workers, transports.

Reading order: `placement`, `controller`, `group`, `transport`, `rank_context`, `rank_worker`, `world`, `torchrun`,
`ray`.
"""
