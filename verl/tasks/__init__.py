"""Several tasks on one actor: shares, weights, constraints, files.

Reading order: `task`, `weights`, `file`.
"""
