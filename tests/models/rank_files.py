"""What a job of ranks makes of model directories.

python rank_files.py FOLDER NAME...; prints a line of JSON a rank and directory: why an actor, a critic, a reference and
a reward model of it were refused, or the checksum of the actor's weights. FOLDER has a good model, "good".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import verl
from verl.errors import ModelError
from verl.weights.shard import checksum


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        path = str(folder / name)
        makes = (
            lambda path=path: verl.Actor(path, strategy="fsdp"),
            lambda path=path: verl.Critic(path, strategy="fsdp"),
            lambda path=path: verl.Reward(path),
        )
        line: dict[str, Any] = {"files": name, "refused": [*map(refusal, makes)]}
        if not line["refused"][0]:
            line["checksum"] = checksum(makes[0]().shards())
        sys.stdout.write(json.dumps(line) + "\n")
    for name in sys.argv[2:]:
        good = verl.Actor(str(folder / "good"), strategy="fsdp")
        said = refusal(partial(good.make_reference, str(folder / name)))
        sys.stdout.write(json.dumps({"files": name, "reference": said}) + "\n")
