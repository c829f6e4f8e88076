"""Chromium without a window or a network, for tests of the explorer's page."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from programs import missing_programs
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

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
    """A browser with a folder for downloads."""
    assert not missing_programs(), missing_programs()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        browser = Browser(driver, downloads)
        try:
            driver.get("about:blank")
            browser.complaints()  # those of Chromium's own first page
            yield browser
        finally:
            driver.quit()


class Browser:
    """A page and a person's actions on it."""

    def __init__(self, driver: webdriver.Chrome, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, path: Path, **state: Any) -> None:
        """Load a page with a view, and wait until it is drawn."""
        self.driver.get("about:blank")  # otherwise another fragment would not load the page again
        self.driver.get(f"{path.as_uri()}#{quote(json.dumps(state))}")
        self.wait("document.body.dataset.ready")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()
        self.settle()

    def slide(self, name: str, value: float) -> None:
        script = (
            "Object.assign(arguments[0], {value: arguments[1]}).dispatchEvent(new Event('input'))"
        )
        self.run(script, self.find(f"#{name}"), value)
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise; `arguments` is an array."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def state(self, *names: str) -> list[Any]:
        """Parts of the state of the view."""
        state = self.run("explorer.state()")
        return [state[name] for name in names]

    def text(self, name: str) -> str:
        return self.run("document.getElementById(arguments[0]).textContent", name)

    def wait(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        self._until(lambda: self.run(script), script)

    def settle(self) -> None:
        """Wait until the page is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 30)))")

    def complaints(self) -> list[str]:
        """Messages on the console, and requests for anything but the page itself, since the last call."""
        urls = []
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                urls.append(event["params"]["request"]["url"])
        own = ("file:", "data:", "blob:", "about:")
        requests = [url for url in urls if not url.startswith(own)]
        return [entry["message"] for entry in self.driver.get_log("browser")] + requests

    def downloaded(self, name: str) -> bytes:
        """The content of a file that the page offered."""
        path = self.downloads / name
        self._until(path.is_file, name)
        return path.read_bytes()

    def _until(self, condition: Callable[[], Any], waited_for: str) -> None:
        waiting = WebDriverWait(self.driver, 10, poll_frequency=0.02)
        waiting.until(lambda _: condition(), f"waited 10 s for {waited_for}")
