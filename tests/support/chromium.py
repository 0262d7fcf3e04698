"""Open a page in headless Chromium, and see what it does: scripts, dialogs, requests, messages, its width, a picture.

Debian's `chromium-headless-shell` or `chromium` is spoken to over a pair of pipes (`--remote-debugging-pipe`): its own
protocol, with a null byte after every message, needs no package of Python and opens no port. Starting it takes about a
second of a processor, so tests share one through the fixture `browser` of `tests/conftest.py`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MISSING = f"none of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium-headless-shell"
PHONE, DESK = 390, 1280
TIMEOUT = 60.0
OWN = "halfstep-test-rig"
"""The name of the scripts that the rig evaluates itself."""
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-extensions",
    ),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio", "--no-default-browser-check"),
    # A page that asks for something over a network gets nothing, and is seen to ask.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def program() -> str | None:
    """Return the path of an installed Chromium; None without one."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


@dataclass
class Seen:
    """What a page did, from its first byte."""

    console: list[str] = field(default_factory=list)
    """Messages of scripts, and those of Chromium about the page."""
    dialogs: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    """The address, or the beginning of the code, of every script that was compiled, handlers in attributes too."""
    requests: list[str] = field(default_factory=list)
    """The addresses of everything that was asked for beside the page itself; data: addresses are none."""
    errors: list[str] = field(default_factory=list)


class Page:
    """An open page."""

    def __init__(self, browser: Chromium, session: str, address: str) -> None:
        self._browser, self._session, self.address = browser, session, address
        self.seen = Seen()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, as JSON; a promise is awaited."""
        code = f"{expression}\n//# sourceURL={OWN}"
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    @property
    def dom(self) -> str:
        """The document as it is now."""
        return str(self.evaluate("document.documentElement.outerHTML"))

    @property
    def scroll_width(self) -> int:
        """The width of the content, in CSS pixels; more than the window's where the page scrolls sideways."""
        return int(self.evaluate("document.documentElement.scrollWidth"))

    @property
    def window_width(self) -> int:
        """The width of the window that the page is laid out for."""
        return int(self.evaluate("document.documentElement.clientWidth"))

    def wider_than_window(self) -> list[str]:
        """Return the elements that reach beyond the right edge and are not cut off by one around them."""
        return [str(one) for one in self.evaluate(_TOO_WIDE)]

    def use(self) -> None:
        """Point at, focus and click everything, as a hostile page would like a reader to."""
        self.evaluate(_USE)
        self.call("Runtime.evaluate", expression=f"new Promise(r => setTimeout(r, 50))\n//# sourceURL={OWN}")

    def screenshot(self, path: Path, height: int = 16_000) -> Path:
        """Write a picture of the page: of the whole, or of so many pixels from its top."""
        size = self.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], height), "scale": 1}
        done = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(done["data"]))
        return path

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol to the page, and return the answer."""
        return self._browser.call(method, self._session, **parameters)

    def hear(self, method: str, said: dict[str, Any]) -> None:
        """Record an event of the page."""
        if method == "Page.javascriptDialogOpening":
            self.seen.dialogs.append(f"{said['type']}: {said['message']}")
            self._browser.send("Page.handleJavaScriptDialog", self._session, accept=False)
        elif method == "Runtime.consoleAPICalled":
            self.seen.console.append(" ".join(str(one.get("value", one.get("description"))) for one in said["args"]))
        elif method == "Log.entryAdded":
            self.seen.console.append(str(said["entry"]["text"]))
        elif method == "Runtime.exceptionThrown":
            self.seen.errors.append(str(said["exceptionDetails"].get("text")))
        elif method == "Network.requestWillBeSent" and not self._is_own(said["request"]["url"]):
            self.seen.requests.append(said["request"]["url"])
        elif method == "Debugger.scriptParsed" and said["url"] != OWN:
            self.seen.scripts.append(f"{said['url']} line {said['startLine'] + 1}")

    def _is_own(self, address: str) -> bool:
        return address.partition("#")[0] == self.address or address.startswith(("data:", "about:"))


class Chromium:
    """A running browser, until it is closed."""

    def __init__(self) -> None:
        path = program()
        assert path is not None, MISSING
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        reads, self._to = _pipe()
        self._from, writes = _pipe()
        # The protocol is on the descriptors 3 and 4 of the browser, which a shell puts there.
        words = ["bash", "-c", 'r=$1 w=$2; shift 2; exec "$@" 3<&"$r" 4>&"$w"', "bash", str(reads), str(writes)]
        words += [path, *FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={self._folder}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, pass_fds=(reads, writes), start_new_session=True, **quiet)
        os.close(reads)
        os.close(writes)
        self._rest, self._number = b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    @contextlib.contextmanager
    def open(self, file: Path, *, width: int = DESK, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Open a local file in a window of this width, and wait until it is loaded and drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, file.resolve().as_uri())
        for domain in ("Page", "Runtime", "Log", "Network", "Debugger"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=page.address)
        page.evaluate(_LOADED)
        try:
            yield page
        finally:
            del self._pages[session]
            self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command, and return the answer; events that come before it are recorded."""
        number, until = self.send(method, session, **parameters), time.monotonic() + TIMEOUT
        while number not in self._answers:
            self._receive(until)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def send(self, method: str, session: str, **parameters: Any) -> int:
        """Send a command, and return its number."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        left = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while left:
            left = left[os.write(self._to, left) :]
        return self._number

    def _receive(self, until: float) -> None:
        ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
        block = os.read(self._from, 2**20) if ready else b""
        assert block, "Chromium ended" if ready else "Chromium does not answer"
        *messages, self._rest = (self._rest + block).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].hear(message["method"], message["params"])

    def close(self) -> None:
        """End the browser, and remove its profile."""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            # With its children: Debian's command is a script that waits for the browser.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors are not those that the browser's have to become."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


_LOADED = """new Promise(resolve => {
  const drawn = () => requestAnimationFrame(() => setTimeout(() => resolve(true), 0));
  if (document.readyState === "complete" && location.href !== "about:blank") drawn();
  else addEventListener("load", drawn);
})"""
_TOO_WIDE = """[...document.querySelectorAll("body *")].filter(e => {
  if (e.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
  for (let p = e.parentElement; p; p = p.parentElement)
    if (p instanceof SVGElement || getComputedStyle(p).overflowX !== "visible") return false;
  return true;
}).map(e => e.outerHTML.slice(0, 200))"""
_USE = """for (const e of document.querySelectorAll("*")) {
  for (const name of ["mouseover", "mouseenter", "focus", "pointerover", "toggle", "animationstart", "load", "error"])
    e.dispatchEvent(new Event(name, {bubbles: false}));
  if (e.matches("a, summary, button, [onclick], label") && !(e.href + "").startsWith("http")) e.dispatchEvent(
    new MouseEvent("click", {bubbles: true, cancelable: true}));
}"""
