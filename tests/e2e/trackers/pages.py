"""Pages of a real server in a real browser: Debian's chromium, headless, driven by selenium."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import psutil
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.e2e.projects import REPOSITORY

T = TypeVar("T")

ARTIFACTS = Path(os.environ.get("HYDRALOOP_TEST_ARTIFACTS", REPOSITORY / "test-artifacts"))
"""Folder for pictures of pages."""
_PATIENCE = 120.0
"""Seconds for a server to answer or a page to show something; it takes 5 on an idle machine."""
_FLAGS = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in containers
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1800,1200",
)


def why_no_browser() -> str | None:
    """Return the reason why there is no browser, or None."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    packages = "apt-get install chromium chromium-driver, as scripts/nightly.sh does if it can"
    return f"there is no {' and no '.join(missing)}: {packages}" if missing else None


@dataclass(frozen=True)
class Browser:
    """One window."""

    driver: webdriver.Chrome

    @property
    def text(self) -> str:
        """The text of the page. Each line has single spaces, as a reader sees them."""
        lines = self.driver.find_element(By.TAG_NAME, "body").text.splitlines()
        return "\n".join(" ".join(line.split()) for line in lines)

    def shows(self, *words: str) -> None:
        """Wait until the page shows all of these words."""
        self.until(lambda: all(word in self.text for word in words), f"{words}")

    def find(self, selector: str, *, text: str = "") -> WebElement:
        """Wait for an element with this CSS selector that contains `text`."""
        return self.until(lambda: next((one for one in self._all(selector) if text in one.text), None), selector)

    def click(self, selector: str, *, text: str = "") -> None:
        """Wait for an element and click on it. Retried, since a page that is loading may replace the element."""

        def clicked() -> bool:
            self.find(selector, text=text).click()
            return True

        self.until(clicked, f"{selector} to be clicked")

    def count(self, selector: str) -> int:
        """Count elements, including those in the page's shadow roots."""
        found: int = self.driver.execute_script(_COUNT, selector)
        return found

    def keep(self, name: str) -> Path:
        """Take a picture and keep it as a test artifact. Prints and returns its path."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        print(f"picture: {path}")
        return path

    def until(self, found: Callable[[], T | None], what: str) -> T:
        """Wait until `found` returns something true.

        Raises:
            AssertionError: it does not; the message has the text of the page.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                result = found()
            except WebDriverException:  # the element is gone or cannot be clicked yet
                result = None
            if result:
                return result
            assert time.monotonic() < deadline, f"the page does not show {what}, but:\n{self.text[:3000]}"
            time.sleep(0.2)

    def _all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)


_COUNT = """
const inside = root => [...root.querySelectorAll("*")].filter(one => one.shadowRoot).map(one => one.shadowRoot);
const count = root =>
  root.querySelectorAll(arguments[0]).length + inside(root).map(count).reduce((sum, one) => sum + one, 0);
return count(document);
"""


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A new browser with its profile in `folder`."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    service = Service(executable_path=str(shutil.which("chromedriver")))  # named, else selenium looks for a download
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@contextmanager
def served(arguments: Sequence[str], folder: Path, **environment: str) -> Iterator[str]:
    """Start a server, `python -m …` with `--port`, in a folder; yield its address, then end it and its children."""
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    given = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | environment
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--port", str(port)],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _answers(address):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.2)
        yield address
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for one in alive:
        one.kill()
    process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
