"""A small HTTP server that speaks the protocols of a vLLM server, well or badly: `plain_server.py PORT NAME MODE`.

Token i of a response is (sum of the prompt + i) mod 40 + 10; every log-prob is -NAME, which tells who wrote it.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NONSENSE: list[Any] = [
    "<html>It works!</html>",
    [],
    {"choices": []},
    {"choices": [{"token_ids": None}]},
    {"choices": [{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [float("nan")]}, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "because"}]},
    {"choices": [{"token_ids": [-5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [10**9], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [5.5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [0.7]}, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [5] * 999, "logprobs": {"token_logprobs": [-1.0] * 999}, "finish_reason": "stop"}]},
]

#: Head, body, and for how many seconds it is sent.
BODIES: dict[str, tuple[str, bytes, float]] = {
    "html": ("200 OK\r\nContent-Type: text/html\r\nContent-Length: 16", b"<html>Hi!</html>", 0.0),
    "cut": ("200 OK\r\nContent-Length: 5000", b'{"choices": [', 0.0),
    "long": ("200 OK\r\nContent-Length: 5", b'{"choices": []}', 0.0),
    "endless": ("200 OK\r\nContent-Type: application/json", b" " * (1 << 16), 60.0),
    "drip": ("200 OK\r\nContent-Length: 100000", b" ", 60.0),
    "empty": ("200 OK\r\nContent-Length: 0", b"", 0.0),
    "moved": ("302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0", b"", 0.0),
    "no http": ("what", b"\x00\xff" * 9, 0.0),
    "deep": ("200 OK\r\nContent-Length: 200000", b"[" * 200000, 0.0),
    "no gzip": ("200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9", b"no gzip..", 0.0),
    "gzip": ("", b"", 0.0),  # `bomb`, which takes a while
}


def bomb() -> tuple[str, bytes, float]:
    """64 MiB in a few hundred bytes."""
    body = gzip.compress(gzip.compress(bytes(1 << 26)))
    return f"200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: {len(body)}", body, 0.0


class Handler(BaseHTTPRequestHandler):
    name, mode = 0.0, "good"
    version: int | None = None
    coming: int | None = None
    asked = 0
    taken = 0

    def do_GET(self) -> None:
        if self.mode == "proxied" and not self.path.startswith("/proxy/"):
            return self.answer(404, {"error": "nobody lives here"})
        if self.path == "/state":
            return self.answer(200, {"version": self.version, "taken": self.taken, "headers": dict(self.headers)})
        self.answer(200, {"data": [{"id": "plain"}]})

    def do_POST(self) -> None:
        state = type(self)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        route = self.path.split("?")[0].removeprefix("/proxy" if state.mode == "proxied" else "")
        if state.mode == "proxied" and route == self.path:
            self.answer(404, {"error": "nobody lives here"})
        elif route == "/collective_rpc":
            self.answer(200, {"results": [{"version": state.version, "scaled": state.mode != "V2"}]})
        elif "weight" in route or route == "/reset_prefix_cache":
            self.update(route, body)
        elif state.mode == "hang":
            time.sleep(600)
        elif state.mode == "error":
            self.answer(500, {"error": "out of order"})
        elif state.mode in BODIES:
            self.raw(*BODIES[state.mode])
        elif state.mode == "described" and route == "/generate":
            self.answer(404, {"error": "no such thing"})
        elif state.mode == "nonsense":
            state.asked += 1
            self.answer(200, NONSENSE[state.asked % len(NONSENSE)])
        elif route == "/v1/chat/completions":
            said = self.judge(body["messages"][-1]["content"])
            self.answer(200 if said else 500, {"choices": [{"message": {"role": "assistant", "content": said}}]})
        elif route == "/generate":
            self.answer(200, {"text": [body["prompt"] + (self.judge(body["prompt"]) or "")]})
        elif route == "/score" and "hang" in body["responses"]:
            time.sleep(600)
        elif route == "/score":
            self.answer(200, {"rewards": [None if "mumble" in text else len(text) for text in body["responses"]]})
        elif 13 in body["prompt"]:
            self.answer(400, {"error": "13 is forbidden here"})
        elif 14 in body["prompt"]:
            self.answer(500, {"error": "14 is too much"})
        else:
            self.generate(body)

    def update(self, route: str, body: Any) -> None:
        state = type(self)
        if state.mode == "fixed":
            return self.answer(404, {"error": "no such thing"})
        if route == "/update_weights":
            state.coming = body["update_info"]["version"]
        if route == "/finish_weight_update" and state.mode != "forgetful":
            state.version, state.taken = state.coming, state.taken + 1
        self.answer(200, {})

    def generate(self, body: Any) -> None:
        prompt, count = body["prompt"], body["max_tokens"]
        time.sleep(0.02 * count if self.mode == "slow" else 0.005)
        tokens = [(sum(prompt) + i) % 40 + 10 for i in range(count)]
        logprobs = {"token_logprobs": [-self.name] * count}
        self.answer(200, {"choices": [{"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length"}]})

    def judge(self, text: str) -> str | None:
        """Says how long what it reads is, or what it is told to."""
        if text.startswith("say "):
            return text.removeprefix("say ")
        if "crash" in text:
            return None
        return "I cannot say." if "mumble" in text else f"Let me think: 1, 2.\nScore: {len(text)}"

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def raw(self, head: str, body: bytes, seconds: float) -> None:
        """A body, again and again for so long, then the connection ends."""
        self.wfile.write(f"HTTP/1.1 {head}\r\n\r\n".encode())
        end = time.monotonic() + seconds
        while True:
            self.wfile.write(body)
            if time.monotonic() >= end:
                break
            time.sleep(0.0 if len(body) > 1000 else 0.1)
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    Handler.name, Handler.mode = float(sys.argv[2]), sys.argv[3]
    Handler.version = int(sys.argv[4]) if len(sys.argv) > 4 else None
    if Handler.mode == "gzip":
        BODIES["gzip"] = bomb()
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
