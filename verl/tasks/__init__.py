"""Settings of tasks, their constraints, and weights that follow how far each has come.

Reading order: `file`, `weights`.
"""
