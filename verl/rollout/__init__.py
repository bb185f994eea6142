"""Rollout: prompts in, finished samples out, whichever engine.

Reading order: `base`, `options`, `choice`, `embedded`, `vllm`, `hf`, `remote`, `turns`, `episode`,
`tools`, `gateway`, `environments`, `constrained`, `grammar`, `guards`, `stop_strings`.
"""
