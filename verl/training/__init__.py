"""How one model is trained: engines, optimizer, micro-batches, and the record a loss function reads.

Reading order: `engine`, `torch_engine`, `options`, `mini_batch`, `micro_batch`, `forward`, `gradients`, `optimizer`,
`adamw`, `masters`, `schedule`, `checkpointing`, `parallelize`, `parallel`, `ranks`, `backends`.
"""
