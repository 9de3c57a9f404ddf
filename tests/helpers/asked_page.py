"""The page of a server, opened and used in a browser."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.helpers.obedient import SAY, Obedient

PATIENCE = 20_000.0
"""Milliseconds after which something on the page that has not happened is taken to be stuck."""

ROME = "Rome has 2748109 inhabitants, and Paris has fewer."


@dataclass
class Site:
    """A server, its address and its engine."""

    address: str
    app: FastAPI
    engine: Obedient


def watched(context: BrowserContext) -> tuple[Page, list[str]]:
    """A page, and what goes wrong on it."""
    opened, problems = context.new_page(), []
    opened.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    return opened, problems


def ask(page: Page, text: str, *, waits: bool = True, **settings: Any) -> Locator:
    """Ask the model to say a text, and return the column of the answer."""
    page.fill("#question", f"{SAY}{text}")
    fill_more(page, {"max_tokens": 400, **settings})
    page.click("#ask")
    if waits:
        expect(page.locator("#ask")).to_be_enabled(timeout=PATIENCE)
    return page.locator(".cocoa-answer").first


def fill_more(page: Page, fields: dict[str, Any]) -> None:
    """Further fields of the request."""
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#more", json.dumps(fields))
