"""Headless Chromium, the one installed on the system, and everything a page makes it do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass(slots=True)
class Opened:
    """A page, what it wrote to the console as a warning or an error, and the addresses it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def overflows(self) -> bool:
        """Whether the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth > innerWidth")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; ended with the block. Raises RuntimeError when none is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed: apt-get install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str, *, width: int = 1280, dark: bool = False) -> Iterator[Opened]:
    """A page that has finished drawing (body[data-ready])."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
    )
    result = Opened(context.new_page())
    result.page.on("console", lambda m: m.type in ("warning", "error") and result.complaints.append(m.text))
    result.page.on("pageerror", lambda error: result.complaints.append(str(error)))
    result.page.on("request", lambda request: result.requests.append(request.url))
    result.page.goto(address)
    result.page.wait_for_selector("body[data-ready]", state="attached", timeout=60_000)
    yield result
    context.close()
