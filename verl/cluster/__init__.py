"""Ranks and how they are reached: where they are placed, groups of workers, in one process, under torchrun, on Ray.

Reading order: `placement`, `controller`, `group`, `rank_context`, `rank_worker`, `world`, `local`, `torchrun`, `ray`.
"""
