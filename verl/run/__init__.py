"""`verl train`: settings to objects, run directory, resume, export; `verl eval`.

Reading order: `train`, `build`, `data`, `planned`, `memory`, `folder`, `lock`,
`resolved`, `export`, `evaluate`, `agent`.
"""
