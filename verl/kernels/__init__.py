"""Compiled CPU kernels for what stands between matrix products: attention over a paged cache, sampling, norms, rotary
embeddings, gates, softmax over rows, AdamW. Matrix products are torch's.

`compiled.Kernels` is what the rest of the package sees, for the CPU alone. Each kernel has torch code beside its caller
that computes the same, for other devices and where no compiler is found.

Reading order: `compiled`, `build`, `inductor`.
"""
