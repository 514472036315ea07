"""A headless Chromium, driven through its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)


def find_browser() -> str | None:
    """EFFINFER_BROWSER, or a Chromium on the PATH."""
    given = os.environ.get("EFFINFER_BROWSER")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. A context manager."""

    def __init__(self, path: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            path,
            "--headless",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            f"--user-data-dir={self._profile.name}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it has none for root
        ]
        asks, self._ask = os.pipe()
        self._answers, answers = os.pipe()
        # It reads its descriptor 3 and writes its 4.
        redirect = f'exec "$@" 3<&{asks} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "browser", *command],
            pass_fds=(asks, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(asks)
        os.close(answers)
        self._text = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ask)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while (answer := self._read(30)).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, (script, answer)
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 30) -> Any:
        """The value, once it is a true one."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, script
            time.sleep(0.01)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        """With the mouse, where the element is seen."""
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2, width])"
            f"(document.querySelector('{selector}').getBoundingClientRect())"
        )
        assert box[2] > 0, f"{selector} is not seen"
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=box[0], y=box[1], button="left", clickCount=1,
            )  # fmt: skip

    def type(self, selector: str, text: str, *, enter: bool = False) -> None:
        self.evaluate(f"document.querySelector('{selector}').select()")
        self.call("Input.insertText", text=text)
        if enter:
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.call("Input.dispatchKeyEvent", type="keyDown", **key)
            self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def requested(self) -> list[str]:
        """Everything that the page has asked the network for."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [str(event["params"]["request"]["url"]) for event in sent]

    def complaints(self) -> list[str]:
        """What it wrote into its console, and exceptions."""
        names = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in names]

    def _read(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._text:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._text += data
        first, _, self._text = self._text.partition(b"\0")
        return dict(json.loads(first))
