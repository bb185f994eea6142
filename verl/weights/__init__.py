"""Where a weight is and how it moves: layouts, shards, files, from one layout to another.

Reading order: `shard`, `layout`, `shards`, `plan`, `transition`, `tensor_files`.
"""
