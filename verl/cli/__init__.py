"""The command line.

Reading order: `main`, `init`, `plan`, `generate`, `eval`, `export`, `tune`, `agent`, `doctor`.
"""
