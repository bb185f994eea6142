"""The embedded engine: sampler, paged cache, runner."""
