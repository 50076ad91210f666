"""A headless Chromium for the tests of the site, spoken to through chromedriver as WebDriver is written
down; nothing is installed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
OPTIONS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
]
OPTIONS += ["--disable-background-networking", "--disable-component-update"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Space": " "}


def why_none() -> str:
    """What keeps a browser from being started; nothing if it can be."""
    if not CHROMIUM:
        return "no Chromium is installed (Debian: apt install chromium chromium-driver)"
    return "" if DRIVER else "no chromedriver is installed"


def go_without(what: str) -> NoReturn:
    """Skip a test for what is not there; where `COURSE_NEEDS_BROWSER` is 1, fail it."""
    if os.environ.get("COURSE_NEEDS_BROWSER") == "1":
        pytest.fail(what)
    pytest.skip(what)


class Browser:
    """One window of a browser."""

    def __init__(self, address: str, session: str) -> None:
        self.address = f"{address}/session/{session}"

    def ask(self, way: str, place: str, **body: Any) -> Any:
        """Send one command and give its answer."""
        return send(way, self.address + place, body if way == "POST" else None)

    def open(self, address: str | Path) -> None:
        """Go to an address or a file."""
        if isinstance(address, Path):
            address = address.absolute().as_uri()
        self.ask("POST", "/url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.ask("POST", "/execute/sync", script=script, args=arguments)

    def wait(self, script: str, seconds: float = 60) -> Any:
        """What a script returns as soon as it is something, also on a busy machine."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.run(script)
            if answer:
                return answer
            time.sleep(0.05)
        raise TimeoutError(script)

    def size(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Make the window so wide, and prefer a scheme of colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        metrics["mobile"] = width < 600
        self.tool("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.tool("Emulation.setEmulatedMedia", features=[feature])

    def tool(self, command: str, **parameters: Any) -> Any:
        """A command of the browser's own tools for developers."""
        return self.ask("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def find(self, selector: str) -> str:
        """The first element that a selector of CSS finds."""
        found = self.ask("POST", "/element", using="css selector", value=selector)
        return found[ELEMENT]

    def hover(self, selector: str) -> None:
        """Move the mouse over an element that the window shows."""
        self.point("mouse", {"type": "pointerMove", **self.middle(selector)})

    def tap(self, selector: str) -> None:
        """Touch an element that the window shows with a finger."""
        to = {"type": "pointerMove", **self.middle(selector)}
        down = {"type": "pointerDown", "button": 0}
        up = {"type": "pointerUp", "button": 0}
        self.point("touch", to, down, up)

    def middle(self, selector: str) -> dict[str, Any]:
        """Where the middle of an element is, for a pointer."""
        return {"origin": {ELEMENT: self.find(selector)}, "x": 0, "y": 0}

    def point(self, kind: str, *actions: dict[str, Any]) -> None:
        """Move and press a pointer."""
        device = {"type": "pointer", "id": kind, "actions": actions}
        device["parameters"] = {"pointerType": kind}
        self.ask("POST", "/actions", actions=[device])

    def click(self, selector: str) -> None:
        """Click an element."""
        self.ask("POST", f"/element/{self.find(selector)}/click")

    def write(self, selector: str, text: str) -> None:
        """Write into an element."""
        self.ask("POST", f"/element/{self.find(selector)}/value", text=text)

    def press(self, *names: str) -> None:
        """Press keys one after another."""
        for name in names:
            key = KEYS.get(name, name)
            actions = [
                {"type": kind, "value": key} for kind in ("keyDown", "keyUp")
            ]
            device = {"type": "key", "id": "keys", "actions": actions}
            self.ask("POST", "/actions", actions=[device])

    def traffic(self) -> list[tuple[str, str]]:
        """What happened since the last call, in its order: an address was asked for, or its file has come."""
        addresses: dict[str, str] = {}
        happened = []
        for line in self.ask("POST", "/se/log", type="performance"):
            message = json.loads(line["message"])["message"]
            facts = message["params"]
            number = facts.get("requestId")
            if message["method"] == "Network.requestWillBeSent":
                addresses[number] = facts["request"]["url"]
                happened.append(("asked", addresses[number]))
            if message["method"] == "Network.loadingFinished":
                happened.append(("came", addresses.get(number, "")))
        return happened

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        return [address for what, address in self.traffic() if what == "asked"]

    def picture(self, path: Path) -> None:
        """Keep what the window shows as a picture."""
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))


def send(way: str, address: str, body: Any = None) -> Any:
    """One command of WebDriver."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, method=way)
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        facts = json.load(error)["value"]
        raise RuntimeError(f"{facts['error']}: {facts['message'][:400]}") from None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def start() -> Iterator[Browser]:
    """A browser, ended when the block ends."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(
        [str(DRIVER), f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                if send("GET", f"{address}/status")["ready"]:
                    break
            time.sleep(0.1)
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": OPTIONS},
            "goog:loggingPrefs": {"performance": "ALL"},
        }
        made = send(
            "POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}}
        )
        browser = Browser(address, made["sessionId"])
        yield browser
        browser.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()
