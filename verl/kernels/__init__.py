"""Compiled CPU kernels for the steps between matrix products: attention over a paged cache, sampling, norms, rotary
embeddings, gates, softmax over rows, AdamW. Matrix products are torch's.

`compiled.Kernels` is what the rest of the package sees, for the CPU alone. The caller of each kernel has
torch code that computes the same, for other devices and where no compiler is found.

Reading order: `compiled`, `build`, `inductor`.
"""
