"""How one model is trained: engines, optimizer, micro-batches, and the record a loss function reads.

Reading order: `engine`, `torch_engine`, `options`, `runner`, `micro_batch`, `mini_batch`,
`forward`, `steps`, `gradients`, `optimizer`, `adamw`, `checkpointing`, `local_weights`, `parallelize`,
`parallel`, `ranks`, `backends`.
"""
