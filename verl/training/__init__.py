"""How one model is trained: engines, optimizer, micro-batches, and the record a loss function reads.

Reading order: `engine`, `micro_batch`, `forward`, `gradients`, `optimizer`, `adamw`, `options`, `ranks`,
`torch_engine`, `parallel`, `backends`.
"""
