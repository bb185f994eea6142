"""The command line.

Reading order: `main`, `init`, `plan`, `generate`, `eval`, `tune`, `agent`, `doctor`.
"""
