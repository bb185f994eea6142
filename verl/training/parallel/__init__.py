"""Functions that lay a model out over ranks, one a dimension; `verl.training.torch_engine` composes them.

Reading order: `data`, `tensor`, `sequence`, `expert`, `pipeline`.
"""
