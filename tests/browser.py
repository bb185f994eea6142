"""Chromium without a window, spoken to in the DevTools protocol over two pipes: no port is opened.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

#: The program's names.
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60.0


def _pipe() -> tuple[int, int]:
    """Both ends, with numbers that are not those the browser wants."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Browser:
    """One page of one browser; a context manager.

    Args:
        folder: where the browser keeps what is its own.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        theirs, self._to = _pipe()
        self._from, ours = _pipe()
        flags = (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
        )  # fmt: skip
        # The browser reads from 3 and writes to 4; a shell puts the pipes there.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs} 4>&{ours}', PROGRAM, *flags]
        self._process = subprocess.Popen(command, pass_fds=(theirs, ours), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(ours)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _note(self, event: dict[str, Any]) -> None:
        """Errors of the page's scripts, and what its policy refused."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._from, 1 << 20) if ready else b""
            assert part, "the browser does not answer" if not ready else "the browser has ended"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path, width: int) -> None:
        """The page, in a window of that width, loaded. (On a phone `innerWidth` grows with what is too wide.)"""
        self.width = width
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self._loaded("Page.navigate", url=page.resolve().as_uri())

    def reload(self) -> None:
        """The page once more, as one does that reloads itself."""
        self._loaded("Page.reload")

    def _loaded(self, method: str, **params: Any) -> None:
        self.js("window.isOld = true")
        self.call(method, **params)
        deadline = time.monotonic() + _SECONDS
        while not self.js("document.readyState === 'complete' && !window.isOld && location.href !== 'about:blank'"):
            assert time.monotonic() < deadline, "the page is not loaded"

    def js(self, expression: str) -> Any:
        """What an expression is worth in the page, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The text of each element that is seen."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.js(f"{found}.filter(e => e.getClientRects().length).map(e => e.innerText)")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of the first such element."""
        self.mouse(selector, ("mousePressed", 0.5), ("mouseReleased", 0.5))

    def mouse(self, selector: str, *events: tuple[str, float]) -> None:
        """What the mouse does over the first such element: kinds of events, and how far from its left to its right."""
        where = json.dumps(selector)
        self.js(f"document.querySelector({where}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.call("Runtime.evaluate", expression=f"{frames}.then(() => 0)", awaitPromise=True)  # scrolled, and seen so
        box = f"(b => [b.x, b.width, b.y + b.height / 2])(document.querySelector({where}).getBoundingClientRect())"
        left, width, y = self.js(box)
        for kind, share in events:
            x, button = left + share * width, "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        """Set a list or a text field, as a person would: with an event."""
        self.js(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def picture(self, width: int, height: int) -> bytes:
        """The top of the page, as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])
