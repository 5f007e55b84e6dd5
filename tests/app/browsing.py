"""A real browser (Debian's chromium) before `classlens serve`, for the tests of the page and for its screenshots."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from app import small

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--window-size=1400,1000",
)  # fmt: skip
TESTS = Path(__file__).parents[1]


class Server:
    """`classlens serve` in a process of its own."""

    def __init__(self, folder: Path, *models: str, data: Path | None = None) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "classlens", "serve", "--port", "0"]
        command += [part for model in models or ("app.small:loaded",) for part in ("--model", model)]
        command += [] if data is None else ["--data", str(data)]
        where = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, cwd=TESTS, env=where, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        limit = threading.Timer(240, self.process.kill)  # a busy machine takes its time
        limit.start()
        said = self.process.stdout.readline()
        limit.cancel()
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found, said + self.process.stderr.read()
        self.address = found[0]

    def stop(self) -> tuple[int, str, str]:
        """Ctrl-C; its exit code and what it said."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            said, complained = self.process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            self.process.kill()
            said, complained = self.process.communicate()
        return self.process.returncode, said, complained


def open_browser(folder):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, Service(DRIVER))


def open_fresh(browser, address):
    """The page of a visitor who has not been here before, with its first sample explained."""
    browser.get(address)
    browser.execute_script("sessionStorage.clear()")  # a reload would show the view before
    browser.get("about:blank")
    browser.get(address)
    wait(browser, lambda: shown(browser))
    return browser


def resize(browser, width, height, scale=1):
    """A screen of this size; below 500 pixels it is a phone's."""
    screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def wait(browser, what):
    return WebDriverWait(browser, 240, 0.05).until(lambda _: what())


def all_of(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def shown(browser, view="one"):
    """The colours on the page now, and what their headings say."""
    script = (
        "return [...document.querySelectorAll(arguments[0])].filter(panel => panel.querySelector('.evidence'))"
        ".map(panel => [panel.querySelector('b').innerText, panel.querySelector('.evidence').src])"
    )
    return [tuple(pair) for pair in browser.execute_script(script, f"#stage-{view} .panel")]


def click_class(browser, index):
    """Click a class's bar, and wait for its map."""
    browser.find_element(By.CSS_SELECTOR, f'.bar[data-index="{index}"]').click()
    return wait(browser, lambda: [pair for pair in shown(browser) if pair[0] == small.LABELS[index]])[0][1]


def send(browser, path):
    browser.find_element(By.CSS_SELECTOR, "#drop input[type=file]").send_keys(str(path))


def notice(browser):
    return browser.execute_script("return document.querySelector('.notice')?.innerText || ''")


def open_tab(browser, title):
    tabs = all_of(browser, "#views button[role=tab]")
    next(tab for tab in tabs if tab.text.replace("\n", " ") == title).click()
