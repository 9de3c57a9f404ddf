"""A server with a tiny model that says what it is asked to say, and a browser that shows its page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from cocoa_integrations.server import create_app
from tests.helpers.asked_page import PATIENCE, Site, watched
from tests.helpers.chromium import FOUND
from tests.helpers.live_server import served
from tests.helpers.obedient import Obedient


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    engine = Obedient()
    app = create_app(engine)
    with served(app) as address:
        yield Site(address, app, engine)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole run: while it is open, this thread has an event loop, which tests that are coroutines need."""
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=FOUND, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1200, "height": 900})
    made.set_default_timeout(PATIENCE)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, site: Site) -> Iterator[Page]:
    """The page, ready for a question. Nothing may be written to its console, and no dialog may open."""
    opened, problems = watched(context)
    opened.goto(site.address)
    expect(opened.locator("#model")).to_have_text("Model: obedient", timeout=PATIENCE)
    yield opened
    site.engine.free.set()
    assert problems == []
