"""Take the pictures of the browser example: in mid-sentence, and reloaded, at its end.

Needs Chromium and its driver (Debian: ``chromium-driver``), and a gateway that lets any page call:

    PENSTOCK_GATEWAY__CORS_ORIGINS='*' penstock serve --model demo
    python scripts/browser_pictures.py --model demo
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx

EXAMPLE = Path(__file__).parents[1] / "examples" / "browser"
PICTURES = Path(__file__).parents[1] / "docs" / "img"
PATIENCE_S = 60.0
SIZE = "760,560"


class Browser:
    """A headless Chromium, spoken to as W3C's WebDriver says."""

    def __init__(self, port: int) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        wait_until(self._is_up)
        flags = ["--headless=new", "--no-sandbox", f"--window-size={SIZE}", "--disable-gpu"]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}
        made = self._http.post("/session", json={"capabilities": wanted}).json()["value"]
        self._session = f"/session/{made['sessionId']}"

    def _is_up(self) -> bool:
        try:
            return bool(self._http.get("/status").json()["value"]["ready"])
        except httpx.TransportError:
            return False

    def call(self, name: str, **values: Any) -> Any:
        """A command of the session."""
        return self._http.post(f"{self._session}/{name}", json=values).json()["value"]

    def run(self, script: str) -> Any:
        """The value of a piece of JavaScript."""
        return self.call("execute/sync", script=f"return {script}", args=[])

    def picture(self, path: Path) -> None:
        """Save what the window shows."""
        value = self._http.get(f"{self._session}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(value))

    def close(self) -> None:
        """End browser and driver."""
        self._http.delete(self._session)
        self._http.close()
        self._driver.terminate()
        self._driver.wait()


def wait_until(condition: Any) -> None:
    """Poll until a condition holds.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the page does not come to where it should")
        time.sleep(0.01)


def main() -> None:
    """Ask, take a picture in mid-sentence, reload, and take one at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=12, help="read before the reload")
    options = parser.parse_args()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=EXAMPLE)
    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{pages.server_port}/index.html"
    browser = Browser(pages.server_port + 1)
    try:
        browser.call("url", url=f"{address}?gateway={options.gateway}&model={options.model}")
        browser.run("document.querySelector('button').click()")
        seen = "JSON.parse(sessionStorage.getItem('stream') ?? '{}')"
        wait_until(lambda: browser.run(f"({seen}).index >= {options.tokens}"))
        browser.picture(PICTURES / "browser-before-reload.png")
        before = browser.run(f"({seen}).text")
        browser.call("refresh")
        wait_until(lambda: browser.run(f"({seen}).ended"))
        after = browser.run(seen)
        browser.picture(PICTURES / "browser-after-reload.png")
    finally:
        browser.close()
        pages.shutdown()
    assert after["text"].startswith(before), "the answer began anew"
    assert len(after["text"]) > len(before), "nothing came after the reload"
    assert after["resumed"] == 1, "the stream ended before the reload"
    print(f"{len(before)} characters before the reload, {len(after['text'])} at the end")


if __name__ == "__main__":
    main()
