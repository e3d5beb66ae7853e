"""A real browser, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@contextmanager
def browsing(*flags: str) -> Iterator[Page]:
    """An empty page in a browser of its own. Skip the test where no Chromium is installed; fail it where ``CI`` is set."""
    if CHROMIUM is None:
        missing = "no Chromium is installed"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        page = browser.new_page()
        page.set_default_timeout(30_000)
        yield page
        browser.close()
