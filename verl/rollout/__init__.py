"""Rollout: prompts in, finished samples out, whichever engine.

Reading order: `base`, `options`, `choice`, `embedded`, `vllm`, `hf`, `remote`, `episode`, `rows`, `tools`, `gateway`,
`constrained`, `grammar`, `guards`, `stop_strings`.
"""
