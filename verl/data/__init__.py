"""Data: prompts, offline data, buffers, and cursors that resume exactly.

Reading order: `prompts`, `cursor`, `prefetch`, `loader`, `pools`, `files`, `forms`, `chat`, `tokenize`, `text`,
`tasks`, `offline`, `buffers`, `task_loader`, `alignment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.data.task_loader import get_dataloader

__all__ = ["get_dataloader"]


def __getattr__(name: str) -> Any:
    if name == "get_dataloader":  # pyarrow is imported when it is used
        from verl.data.task_loader import get_dataloader

        return get_dataloader
    raise AttributeError(f"module 'verl.data' has no attribute '{name}'")
