"""How one model is trained: engines, optimizer, micro-batches, and the record a loss function reads."""
