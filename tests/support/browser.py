"""Opens a page in headless Chromium, driven through the DevTools protocol over pipes."""

import base64
import json
import os
import pathlib
import shutil
import subprocess
import threading
from typing import NamedTuple

import pytest


class Page(NamedTuple):
    """The result of loading a page in a browser."""

    requests: list[str]  # URLs
    errors: list[str]  # errors of the console, the log and scripts
    value: dict  # result of the expression
    screenshot: bytes  # PNG of the window


class Browser:
    """A headless Chromium; skips the test if it is not installed."""

    def __init__(self, folder: pathlib.Path):
        program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if program is None:
            pytest.skip("Chromium is not installed: apt-get install chromium")
        (read, to_browser), (from_browser, write) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe".split()

        def place() -> None:  # Chromium reads from file descriptor 3 and writes to 4
            ends = os.dup(read), os.dup(write)  # either may be 3 or 4
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [program, *flags, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=place, stderr=subprocess.DEVNULL)
        # Kills a browser that hangs for 120 seconds, so that the test fails.
        self._watchdog = threading.Timer(120, self._process.kill)
        self._watchdog.start()
        os.close(read)
        os.close(write)
        self._out, self._in, self._count = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb"), 0
        self._events: list[dict] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.wait()

    def open(self, path: pathlib.Path, width: int, height: int, expression: str) -> Page:
        """Opens a file in a window of a size in pixels, and evaluates a JavaScript expression that is an object."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        self._events.clear()
        self._call("Page.navigate", session, url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()
        found = self._call("Runtime.evaluate", session, expression=f"({expression})", returnByValue=True)
        picture = base64.b64decode(self._call("Page.captureScreenshot", session)["data"])
        named = [(event["method"], event["params"]) for event in self._events if event.get("sessionId") == session]
        requests = [params["request"]["url"] for method, params in named if method == "Network.requestWillBeSent"]
        failures = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
        errors = [json.dumps(params) for method, params in named if method in failures]
        return Page(requests, errors, found["result"]["value"], picture)

    def _call(self, method: str, session: str = "", **params) -> dict:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._receive()).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict:
        """Reads a message, and saves it if it is an event."""
        content = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "Chromium ended"
            content += byte
        message = json.loads(content)
        if "method" in message:
            self._events.append(message)
        return message
