"""The process in which a user's reward function runs so that it can be killed; see `ProcessCaller`."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
from typing import BinaryIO

from verl.errors import VerlError
from verl.rewards.loading import load_function
from verl.rewards.scores import call_plain


def main(spec: str) -> None:
    # The function may print and read: it gets other streams than the ones that carry requests and replies.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, lines), daemon=True).start()
    try:
        function = load_function(spec)
    except VerlError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"ready": True})
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    while True:
        request = json.loads(lines.get())
        scores = call_plain(function, request["args"], request["kwargs"], request["rows"], loop)
        _reply(replies, {"scores": [score.as_json() for score in scores]})


def _listen(requests: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    for line in requests:
        lines.put(line)
    os._exit(0)  # whoever asked is gone, so a call that still runs is for nobody


def _reply(replies: BinaryIO, content: dict[str, object]) -> None:
    replies.write(json.dumps(content).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
