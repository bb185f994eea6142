"""Functions that lay a model out over ranks, one a dimension; `verl.training.parallelize` composes them.

Reading order: `data`, `tensor`, `sequence`, `expert`, `pipeline`, `stages`.
"""
