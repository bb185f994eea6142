"""Where a weight is and how it moves: layouts, shards, files, from one layout to another."""
