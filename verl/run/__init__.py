"""`verl train`: settings to objects, run directory, resume, export; `verl eval`.

Reading order: `train`, `check`, `data`, `build`, `planned`, `memory`, `folder`, `lock`,
`resolved`, `export`, `evaluate`, `agent`.
"""
