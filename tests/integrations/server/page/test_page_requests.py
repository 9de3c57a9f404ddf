"""Requests of the page: their settings, their errors, their key, and copies of them."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.asked_page import PATIENCE, ROME, Site, ask, watched
from tests.helpers.chromium import needs_chromium
from tests.helpers.live_server import served
from tests.helpers.obedient import SAY, Obedient
from tests.helpers.processes import python, run

pytestmark = [pytest.mark.slow, needs_chromium]


def test_errors_are_shown(page: Page, site: Site) -> None:
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#question", "Who?")
    for more, words in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        page.fill("#more", more)
        page.click("#ask")
        expect(page.locator("#problem")).to_contain_text(words)
    assert page.locator(".cocoa-answer").count() == 0


def test_the_server_s_errors_are_shown(context: BrowserContext, site: Site) -> None:
    page, problems = watched(context)
    page.goto(site.address)
    column = ask(page, ROME, top_p=0.5)
    expect(column.locator(".cocoa-verdict")).to_contain_text("No answer: top_p=0.5 is not supported")
    assert len(problems) == 1  # the browser itself writes that the status was 400
    expect(ask(page, ROME).locator(".cocoa-text")).to_have_text(ROME)


def test_an_answer_that_breaks_off_says_so(page: Page, site: Site) -> None:
    site.engine.free.clear()
    column = ask(page, ROME, waits=False)
    expect(column.locator(".cocoa-span")).to_have_count(3, timeout=PATIENCE)
    site.app.state.cocoa.calls.cancel()  # as a server that shuts down
    site.engine.free.set()
    words = "The answer is incomplete: the server is shutting down; try again later"
    expect(column.locator(".cocoa-verdict")).to_have_text(words, timeout=PATIENCE)
    expect(page.locator("#ask")).to_be_enabled()
    assert column.locator(".cocoa-span").count() == 3


def test_a_server_that_cannot_be_reached(context: BrowserContext, site: Site) -> None:
    page, _ = watched(context)  # the browser itself writes that there is no network
    page.goto(site.address)
    expect(page.locator("#model")).to_have_text("Model: obedient")
    context.set_offline(True)
    column = ask(page, ROME)
    expect(column.locator(".cocoa-verdict")).to_have_text("No answer: the server cannot be reached")
    assert column.locator(".cocoa-span").count() == 0


def test_without_a_clipboard_the_copy_is_shown(context: BrowserContext, site: Site) -> None:
    """As on a page that does not come over TLS, from another machine."""
    page, problems = watched(context)
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.goto(site.address)
    column = ask(page, ROME)
    column.get_by_role("button", name="Copy as curl").click()
    shown = column.get_by_label("The request as curl").input_value()
    assert shown.startswith(f"curl '{site.address}/v1/chat/completions'")
    assert SAY + ROME in shown
    assert problems == []


def test_settings_are_sent(page: Page, site: Site) -> None:
    page.fill("#passage", "  Rome is old. ")
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#system", "Be brief.")
    page.fill("[name=max_risk]", "0.7")
    page.select_option("[name=span_boundary]", "own")
    with page.expect_request("**/v1/chat/completions") as sent:
        column = ask(page, ROME)
    body = sent.value.post_data_json
    assert [one["content"] for one in body["messages"]] == ["Be brief.", f"Rome is old.\n\n{SAY}{ROME}"]
    assert body["cocoa"] == {
        "method": "cocoa-sig",
        "span_boundary": "own",
        "max_risk": 0.7,
        "source": ["Rome is old."],
        "report": "message",
        "candidates": True,
    }
    expect(column.locator(".cocoa-reached")).to_have_count(1)
    expect(column.locator(".summary")).to_contain_text("stopped by max_risk")


def test_the_request_as_a_command_and_as_a_program(
    context: BrowserContext, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    said = 'It\'s "quoted" $(touch x) `y` \\n ${z} é 😀.'
    column = ask(page, said, stop=["###"], parallel_tool_calls=True, seed=None)
    expect(column.locator(".cocoa-text")).to_have_text(said)
    copied = {}
    for name in ("curl", "Python"):
        column.get_by_role("button", name=f"Copy as {name}").click()
        expect(column.locator(".copied")).to_have_text("Copied.")
        copied[name] = page.evaluate("navigator.clipboard.readText()")
    monkeypatch.setenv("NO_PROXY", "*")
    assert python(copied["Python"]).splitlines() == [said, column.locator(".cocoa-verdict").inner_text()]
    command = run(["bash", "-c", copied["curl"]])
    assert command.returncode == 0, command.stderr
    assert json.loads(command.stdout)["choices"][0]["message"]["content"] == said


def test_a_key_is_asked_for_and_kept_for_the_session(context: BrowserContext) -> None:
    app = create_app(Obedient(), ServerSettings(api_keys=("right",)))
    with served(app) as address:
        page, _ = watched(context)
        page.goto(address)
        expect(page.locator("#model")).to_have_text("This server needs an API key.")
        for key, words in (("wrong", "the API key is missing or wrong"), ("right", "Model: obedient")):
            page.get_by_label("API key").fill(key)
            page.get_by_label("API key").press("Tab")
            expect(page.locator("#model")).to_contain_text(words)
        expect(ask(page, ROME).locator(".cocoa-text")).to_have_text(ROME)
        page.reload()
        expect(page.locator("#model")).to_have_text("Model: obedient")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        expect(ask(page, ROME).locator(".cocoa-text")).to_have_text(ROME)
        other = context.new_page()  # another session
        other.goto(address)
        expect(other.locator("#model")).to_have_text("This server needs an API key.")
        copied = page.evaluate("asCurl({model: 'm', messages: []}, true) + asPython({model: 'm', messages: []}, true)")
        assert "right" not in copied
        assert '"Authorization: Bearer $COCOA_API_KEY"' in copied
        assert 'os.environ["COCOA_API_KEY"]' in copied
