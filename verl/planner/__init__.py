"""Which placement and which parallel sizes a cluster should run with, computed before anyone has it. Imports no torch.

`hardware` has data sheets, `memory` and `cost` predict bytes and seconds of one model, `search` looks for the best
placement and predicts scaling, `picture` shows a plan.

Reading order: `search`, `cost`, `memory`, `hardware`, `picture`.
"""
