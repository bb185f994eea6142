"""Search over settings: many short runs of one file, by Optuna.

Reading order: `space`, `study`, `trial`.
"""
