"""Commands of others as settings of ours; their keys in files are read by `config/other_names.py`.

Reading order: `openrlhf`, with its table `openrlhf.yaml`.
"""
