"""A headless Chromium, driven over its debugging pipe: no driver, no port, no package."""
from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe")
NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND"  # a request that would leave fails at once


def find_chromium() -> str | None:
    """The browser's path: $CHROMIUM, or what is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. What it asks the network for, and what it complains about, is kept."""

    def __init__(self, program: str, patience: float = 120) -> None:
        self.patience, self.serial, self.session = patience, 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.loaded = False
        self.rest = b""
        self.profile = tempfile.mkdtemp(prefix="tinymlir-browser-")
        out, self.write = os.pipe()
        self.read, back = os.pipe()
        out, back = (move_up(fd) for fd in (out, back))
        self.process = subprocess.Popen(
            [program, *QUIET, NOWHERE, f"--user-data-dir={self.profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(3, 4), preexec_fn=lambda: (os.dup2(out, 3), os.dup2(back, 4)))
        for fd in (out, back):
            os.close(fd)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write)
        os.close(self.read)
        shutil.rmtree(self.profile, ignore_errors=True)

    # ------------------------------------------------------------ the protocol

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the DevTools protocol and wait for its result."""
        self.serial += 1
        message: dict[str, Any] = {"id": self.serial, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            told = self.receive(self.patience)
            if told is None:
                raise TimeoutError(f"{method}: no answer in {self.patience} s")
            if told.get("id") != self.serial:
                self.notice(told)
            elif "error" in told:
                raise RuntimeError(f"{method}: {told['error']['message']}")
            else:
                return told["result"]

    def receive(self, timeout: float) -> Any:
        """The next message, or None if there is none in time."""
        end = time.monotonic() + timeout
        while b"\0" not in self.rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                return None
            data = os.read(self.read, 1 << 20)
            if not data:
                raise RuntimeError("the browser has gone")
            self.rest += data
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def notice(self, event: dict[str, Any]) -> None:
        """Keep what matters of an event."""
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            told = params["exceptionDetails"]
            what = told.get("exception", {}).get("description", told.get("text"))
            self.complaints.append(f"{what} {told.get('url', '')}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str([a.get("value") for a in params["args"]]))

    # ------------------------------------------------------------ a page

    def open(self, page: Path | str) -> None:
        """Load a page, by path or address, and forget what was noticed before."""
        self.requests.clear()
        self.complaints.clear()
        self.loaded = False
        url = page if isinstance(page, str) else page.as_uri()
        self.send("Page.navigate", url=url)
        end = time.monotonic() + self.patience
        while not self.loaded:
            told = self.receive(end - time.monotonic())
            if told is None:
                raise TimeoutError(f"{url} does not load")
            self.notice(told)

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, promises waited for."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True,
                         awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["exception"].get("description"))
        return told["result"].get("value")

    def until(self, expression: str) -> Any:
        """Ask again and again until the answer is true."""
        end = time.monotonic() + self.patience
        while not (value := self.ask(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)
        return value

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)

    def theme(self, name: str) -> None:
        """Light or dark, as the reader's system would ask for it."""
        self.send("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": name}])

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=KEYS.get(key, 0))

    def picture(self, path: Path, whole: bool = False) -> None:
        told = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40, "Home": 36,
        "End": 35, "Enter": 13, "Tab": 9}


def move_up(fd: int) -> int:
    """The same pipe under a number that 3 and 4 cannot overwrite."""
    import fcntl
    new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return new
