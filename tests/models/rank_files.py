"""What a job of ranks makes of model directories.

python rank_files.py FOLDER NAME...; prints a line of JSON a rank and directory: why an actor and a critic
of it were refused, or the checksum of the actor's weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import verl
from verl.errors import ModelError
from verl.shard import checksum


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        path = str(Path(sys.argv[1], name))
        found: dict[str, Any] = {"files": name}
        makes = (
            lambda path=path: verl.Actor(path, strategy="fsdp"),
            lambda path=path: verl.Critic(path, strategy="fsdp"),
        )
        found["refused"] = [*map(refusal, makes)]
        if not found["refused"][0]:
            found["checksum"] = checksum(makes[0]().shards())
        sys.stdout.write(json.dumps(found) + "\n")
