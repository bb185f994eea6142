"""The command line.

Reading order: `main`, `init`, `plan`, `generate`, `export`, `tune`, `agent`, `doctor`.
"""
