"""Data: prompts, offline data, buffers, and cursors that resume exactly.

Reading order: `prompts`, `pools`, `cursor`, `prefetch`, `loader`, `files`, `forms`, `chat`, `tokenize`, `text`,
`tasks`, `offline`, `buffers`, `task_loader`, `alignment`.
"""

from verl._base.later import later

__all__ = ["get_dataloader"]
#: It imports pyarrow.
HOMES = {"get_dataloader": "verl.data.task_loader"}
__getattr__ = later(__name__, HOMES)
