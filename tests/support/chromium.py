"""A browser without a window, told what to do by the DevTools protocol over two pipes."""

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = "chromium"
_LIMIT_S: Final = 60
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Tab:
    """A page that is shown. problems: what it complained of since it was opened"""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = 0
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **words: object) -> Any:
        """What a method of the protocol answers."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": words}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT_S
        while b"\0" not in self._read:
            assert select.select([self._back], [], [], max(0, end - time.monotonic()))[0], "the browser says nothing"
            self._read += os.read(self._back, 1 << 20)
        text, _, self._read = self._read.partition(b"\0")
        fields: dict[str, Any] = json.loads(text)
        match fields.get("method"):
            case "Page.loadEventFired":
                self._loaded += 1
            case "Runtime.exceptionThrown":
                self.problems.append(str(fields["params"]["exceptionDetails"]))
            case "Log.entryAdded" if fields["params"]["entry"]["level"] == "error":
                self.problems.append(str(fields["params"]["entry"]))
        return fields

    def open(self, url: str, n_pages: int = 1) -> None:
        """Show a page, and all that it loads. n_pages: more if it leads on by itself"""
        wanted = self._loaded + n_pages
        self.call("Page.navigate", url=url)
        while self._loaded < wanted:
            self._next()

    def resize(self, width: int, height: int) -> None:
        """Of a screen, in its pixels: of a telephone, if it is narrow."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression; return its value, or that of the promise once it is fulfilled."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until it is true."""
        step = (
            f"new Promise(done => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 50); look() }})"
        )
        assert self.evaluate(step)

    def picture(self, to: Path) -> None:
        """As a PNG."""
        to.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(home: Path) -> Iterator[Tab]:
    """One, with a profile of its own below home."""
    take, to = os.pipe()
    back, give = os.pipe()
    # It reads what it is told from fd 3, and answers on fd 4.
    script = f'exec {PROGRAM} "$@" 3<&{take} 4>&{give} {take}<&- {give}>&-'
    words = ["bash", "-c", script, PROGRAM, *_FLAGS, f"--user-data-dir={home}", "about:blank"]
    log = (home.parent / "chromium.log").open("w")
    with log, subprocess.Popen(words, pass_fds=(take, give), stdout=log, stderr=log) as process:
        os.close(take)
        os.close(give)
        try:
            yield Tab(to, back)
        finally:
            os.close(to)  # it ends
            os.close(back)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
