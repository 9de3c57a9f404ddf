"""Answers on the page: live, by keyboard, side by side, stopped, and with foreign text."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from cocoa_engine import CocoaEngine
from cocoa_engine.rendering.highlights import RiskScale
from cocoa_engine.rendering.wording import describe_different_kinds
from cocoa_integrations.server import create_app
from tests.helpers.asked_page import PATIENCE, ROME, Site, ask, fill_more, watched
from tests.helpers.chromium import needs_chromium
from tests.helpers.live_server import served
from tests.helpers.made_up_answers import ATTACK
from tests.helpers.obedient import SAY, Obedient
from tests.helpers.reasoning_models import OPENS

pytestmark = [pytest.mark.slow, needs_chromium]

WHO = [{"role": "user", "content": "Who wrote it?"}]


def test_spans_arrive_live_with_their_risk_and_the_verdict_is_first(page: Page, site: Site) -> None:
    site.engine.free.clear()
    column = ask(page, ROME, waits=False)
    spans = column.locator(".cocoa-text .cocoa-span")
    expect(spans).to_have_count(3, timeout=PATIENCE)
    expect(column.locator(".cocoa-verdict")).to_have_text("Answering…")
    expect(page.locator("#stop")).to_be_enabled()
    assert ROME.startswith(column.locator(".cocoa-text").inner_text())
    classes = [one.get_attribute("class") for one in spans.all()]
    assert classes == [f"cocoa-span cocoa-level-{level}" for level in (0, 1, 2)]
    site.engine.free.set()
    expect(page.locator("#ask")).to_be_enabled(timeout=PATIENCE)
    expect(column.locator(".cocoa-text")).to_have_text(ROME)
    answer = site.engine.chat([{"role": "user", "content": SAY + ROME}], max_new_tokens=400)
    assert [f"cocoa-span cocoa-level-{RiskScale().level(span.risk)}" for span in answer.spans] == [
        one.get_attribute("class") for one in spans.all()
    ]
    verdict, text = column.locator(".cocoa-verdict"), column.locator(".cocoa-text")
    expect(verdict).to_have_text(answer.verdict)
    assert verdict.bounding_box()["y"] < text.bounding_box()["y"]  # type: ignore[index]
    checks = answer.check_these()
    assert column.locator(".cocoa-check li").all_inner_texts() == [
        f"{one.text} ({one.risk:.2f}): {'; '.join(one.reasons)}" for one in checks
    ]
    expect(column.locator(".summary")).to_contain_text(f"{len(answer.spans)} spans")
    expect(column.locator(".summary")).to_contain_text("ended by the model")


def test_rivals_on_hover_and_by_keyboard(page: Page, site: Site) -> None:
    column = ask(page, ROME)
    card, spans = page.locator("#card"), column.locator(".cocoa-text .cocoa-span")
    answer = site.engine.chat([{"role": "user", "content": SAY + ROME}], max_new_tokens=400)
    expect(card).to_be_hidden()
    spans.nth(3).hover()
    expect(card).to_be_visible()
    rows = card.locator("tbody tr")
    expect(rows).to_have_count(len(answer.spans[3].candidates))
    expect(card).to_contain_text(f"chosen from {len(answer.spans[3].candidates)} competing candidates; risk level 2 of")
    expect(card.locator("tr.cocoa-kept")).to_contain_text("both")
    card.hover()  # it stays under the pointer
    page.wait_for_timeout(300)
    expect(card).to_be_visible()
    page.mouse.move(1, 1)
    expect(card).to_be_hidden()

    page.focus("#more")
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.evaluate("(one, first) => one === first", spans.first.element_handle())
    expect(card).to_be_visible()
    expect(card).to_contain_text("no other token competed")
    assert focused.get_attribute("aria-describedby") == "card"
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("chosen from 2 competing candidates; risk level 1 of 0 to 3")
    page.keyboard.press("End")
    assert page.locator(":focus").evaluate("(one, last) => one === last", spans.last.element_handle())
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("Tab")  # the spans are one stop: the next one is the first claim to check
    assert page.locator(":focus").evaluate("one => one.closest('.cocoa-check') !== null")
    page.keyboard.press("Enter")
    claimed = answer.check_these()[0].spans[0]
    assert page.locator(":focus").evaluate("(one, span) => one === span", spans.nth(claimed).element_handle())


def test_two_methods_side_by_side(page: Page, site: Site) -> None:
    page.select_option("#compared", "greedy")
    ask(page, ROME)
    columns = page.locator(".cocoa-answer")
    assert columns.locator("h2").all_inner_texts() == ["cocoa-sig", "greedy"]
    left, right = (one.bounding_box() for one in columns.all())
    assert left
    assert right
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    expect(page.locator("#same")).to_have_text("The answers are the same.")
    expect(page.locator("#kinds")).to_be_empty()
    for number, rows in enumerate((3, 0)):  # greedy decoding compares no candidates
        columns.nth(number).locator(".cocoa-span").nth(2).hover()
        expect(page.locator("#card")).to_contain_text("risk level 2")
        expect(page.locator("#card tbody tr")).to_have_count(rows)

    texts = [site.engine.chat(WHO, method=method, max_new_tokens=30).text for method in ("cocoa-sig", "greedy")]
    assert texts[0] != texts[1]
    page.fill("#question", WHO[0]["content"])
    fill_more(page, {"max_tokens": 30})
    page.evaluate("document.getElementById('answers').replaceChildren()")
    page.press("#question", "Control+Enter")
    expect(columns).to_have_count(2)
    expect(page.locator("#ask")).to_be_enabled(timeout=PATIENCE)
    expect(page.locator("#same")).to_be_empty()
    page.select_option("#compared", "")
    ask(page, "Another.")
    expect(columns).to_have_count(1)


def test_the_page_says_where_risks_are_not_comparable(context: BrowserContext, engine: CocoaEngine) -> None:
    with served(create_app(engine)) as address:
        page, problems = watched(context)
        page.goto(address)
        page.select_option("#compared", "greedy")
        page.fill("#question", "Who wrote Dune?")
        fill_more(page, {"max_tokens": 8})
        page.click("#ask")
        expect(page.locator("#ask")).to_be_enabled(timeout=PATIENCE)
        answers = [engine.chat(WHO, method=method, max_new_tokens=8) for method in ("cocoa-sig", "greedy")]
        expect(page.locator("#kinds")).to_have_text(describe_different_kinds(answers) or "")
        expect(page.locator("#kinds")).to_contain_text("estimated probability; how unsure the model was")
        assert problems == []


def test_stop_frees_the_engine(page: Page, site: Site) -> None:
    site.engine.free.clear()
    column = ask(page, ROME, waits=False)
    expect(column.locator(".cocoa-text .cocoa-span")).to_have_count(3, timeout=PATIENCE)
    assert site.engine.session.scheduler.running == 1
    page.click("#stop")
    expect(column.locator(".cocoa-verdict")).to_have_text("Stopped after 3 spans.", timeout=PATIENCE)
    expect(page.locator("#ask")).to_be_enabled()
    expect(page.locator("#stop")).to_be_disabled()
    site.engine.free.set()  # of the pass that ran when the page stopped it
    for _ in range(400):
        if not len(site.app.state.cocoa.calls):
            break
        page.wait_for_timeout(25)
    assert len(site.app.state.cocoa.calls) == 0
    assert site.engine.session.scheduler.running == 0
    expect(column.locator(".cocoa-text .cocoa-span")).to_have_count(3)
    expect(ask(page, ROME).locator(".cocoa-text")).to_have_text(ROME)


def test_foreign_text_stays_text(page: Page, site: Site) -> None:
    page.fill("#passage", ATTACK[0])
    attack = f"{ATTACK[0]}{ATTACK[1]}{ATTACK[2]}\x1b[2J\x00"
    column = ask(page, attack)
    shown = column.locator(".cocoa-text").inner_text()
    assert ATTACK[0] in shown
    assert "<img src=x onerror=alert(1)> & &amp; <!--" in shown
    assert "<U+202E>abc<U+2066>" in shown
    assert "␛[2J" in shown
    for span in column.locator(".cocoa-span").all()[::5]:
        span.focus()
        expect(page.locator("#card")).to_be_visible()
    expect(page.locator("main :is(img, script, style, iframe, svg)")).to_have_count(0)
    assert page.title() == "cocoa: answers with their risk"

    name = "<img src=x onerror=alert(2)>"
    function = {
        "name": name,
        "parameters": {"type": "object", "properties": {name: {"enum": [1, 2]}}, "required": [name]},
    }
    page.fill("#passage", "")
    page.fill("#question", "<script>alert(3)</script>")
    fill_more(
        page, {"max_tokens": 200, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    )
    page.click("#ask")
    expect(page.locator("#ask")).to_be_enabled(timeout=PATIENCE)
    call = page.locator(".cocoa-answer .calls li")
    expect(call).to_contain_text(f"{name} (")
    expect(call).to_contain_text(f"; {name} (")
    expect(page.locator("main :is(img, script, style, iframe, svg)")).to_have_count(0)


def test_reasoning_has_a_box_of_its_own(context: BrowserContext) -> None:
    with served(create_app(Obedient(OPENS))) as address:
        page, problems = watched(context)
        page.goto(address)
        column = ask(page, "Let me see.</think>Rome is old.")
        expect(column.get_by_role("group", name="Answer by cocoa-sig")).to_have_text("Rome is old.")
        thoughts = column.get_by_label("Reasoning")
        expect(thoughts).to_be_hidden()
        column.locator("summary").click()
        expect(thoughts).to_contain_text("Let me see.")
        assert problems == []
