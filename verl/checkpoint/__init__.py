"""Checkpoints: a directory of files, a trainer's state in it, and when one is written.

Reading order: `directory`, `state`, `schema`, `store`, `verify`.
"""
