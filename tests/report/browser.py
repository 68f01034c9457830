"""Chromium without a window, controlled through DevTools over two pipes: no port, and no library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs a browser: apt-get install chromium")
    return found


class Browser:
    """One page in a browser. `requests` are the addresses that it asked for, `errors` what its console reported."""

    def __init__(self) -> None:
        program = chromium()
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={self._profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # DevTools reads from descriptor 3 and writes to 4, neither of which may be one of ours.
        given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (to_read, to_write)]
        command = ["bash", "-c", f'exec "$@" 3<&{given[0]} 4>&{given[1]}', "bash", program, *options]
        self._process = subprocess.Popen(command, pass_fds=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for descriptor in (to_read, to_write, *given):
            os.close(descriptor)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._number = 0
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            self._session = ""
            self._call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, address: str) -> float:
        """Open a page; returns the seconds until it has loaded and drawn a frame, by the browser's clock."""
        for place in ("about:blank", address):  # else an address that differs after # only would not load
            self.requests.clear()
            self.errors.clear()
            self._loaded.clear()
            self._call("Page.navigate", url=place)
            assert self._loaded.wait(ANSWER_S), f"{place} did not load"
        drawn = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now() / 1000))))"
        return float(self.run(drawn))

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as `]` or `ArrowRight`."""
        text = {"text": key} if len(key) == 1 else {}
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def picture(self, path: Path) -> None:
        """Write what is visible, as PNG or, at a path that ends so, as WebP."""
        form = {"format": "webp", "quality": 80} if path.suffix == ".webp" else {"format": "png"}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **form)["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._answers.get(timeout=max(deadline - time.monotonic(), 0.01))
            if answer["id"] == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _listen(self) -> None:
        with open(self._read, "rb") as stream:
            left = b""
            while part := stream.read1(1 << 16):  # type: ignore[attr-defined]
                *messages, left = (left + part).split(b"\0")
                for text in messages:
                    self._take(json.loads(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.put(message)
            return
        found = message["params"]
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(found["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if found["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(found["args"]))
            case "Log.entryAdded" if found["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(found["entry"]))
            case "Page.loadEventFired":
                self._loaded.set()
