"""`verl train`: settings to objects, run directory, resume, export.

Reading order: `train`, `check`, `data`, `rewards`, `build`, `planned`, `memory`, `folder`, `lock`, `resolved`,
`export`, `agent`.
"""
