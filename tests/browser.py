"""Chromium without a window or a network, for tests of the explorer's page."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import missing_programs
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "headless",
    "window-size=1300,1800",  # actions count from the visible part of an element
    "no-sandbox",  # CI runs as root
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "host-resolver-rules=MAP * ~NOTFOUND",
)


@contextmanager
def chromium(downloads: Path) -> Iterator["Browser"]:
    """A browser that stores what it downloads in a folder."""
    assert not missing_programs(), missing_programs()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        driver.set_script_timeout(10)
        browser = Browser(driver, downloads)
        try:
            driver.get("about:blank")
            browser.complaints()  # those of Chromium's own first page
            yield browser
        finally:
            driver.quit()


class Browser:
    """What the tests do with a page."""

    def __init__(self, driver: webdriver.Chrome, downloads: Path) -> None:
        self.driver, self.downloads = driver, downloads

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a page, and wait until it has drawn its first view."""
        self.driver.get("about:blank")  # otherwise another fragment would not load the page again
        self.driver.get(f"{path.as_uri()}{'#' if fragment else ''}{fragment}")
        self.wait("document.body.dataset.ready")

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise; `arguments` is an array."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def wait(self, script: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        end = time.monotonic() + 10
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"waited 10 s for {script}: {self.complaints()}"
            time.sleep(0.02)
        return value

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 30)))")

    def complaints(self) -> list[str]:
        """Messages on the console, and requests for anything but the page itself, since the last call."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        requests = [
            url for url in urls if not url.startswith(("file:", "data:", "blob:", "about:"))
        ]
        return [entry["message"] for entry in self.driver.get_log("browser")] + requests

    def downloaded(self, name: str) -> bytes:
        """The content of a file that the page offered."""
        path, end = self.downloads / name, time.monotonic() + 10
        while not path.is_file():
            assert time.monotonic() < end, f"{name} was not downloaded: {self.complaints()}"
            time.sleep(0.02)
        return path.read_bytes()
