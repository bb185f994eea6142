"""The public names of `verl.dataflow`, for type checkers: made by `python scripts/stubs.py`."""

from verl.dataflow.symbols import advantages as advantages, experience as experience, prompts as prompts, responses as responses, updates as updates
