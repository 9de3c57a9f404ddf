"""The page of a server in a browser: answers, looks, settings, errors, keys, and copies of requests."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import safe
from cocoa_engine.rendering.highlights import RiskScale
from cocoa_engine.rendering.wording import describe_different_kinds
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.chromium import FOUND, needs_chromium
from tests.helpers.live_server import served
from tests.helpers.made_up_answers import ATTACK
from tests.helpers.processes import python, run
from tests.helpers.reasoning_models import OPENS, SAY, Obedient

pytestmark = [pytest.mark.slow, needs_chromium]

PATIENCE = 20_000.0
"""Milliseconds after which something on the page that has not happened is taken to be stuck."""

ROME = "Rome has 2748109 inhabitants, and Paris has fewer."


@dataclass
class Site:
    """A server, its address and its engine."""

    address: str
    app: FastAPI
    engine: Obedient


def watched(context: BrowserContext, address: str) -> tuple[Page, list[str]]:
    """The page at an address, and what goes wrong on it."""
    opened, problems = context.new_page(), []
    opened.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    opened.goto(address)
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
    opened, problems = watched(context, site.address)
    expect(opened.locator("#model")).to_have_text("Model: obedient", timeout=PATIENCE)
    yield opened
    site.engine.free.set()
    assert problems == []


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
        page, problems = watched(context, address)
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
        page, problems = watched(context, address)
        column = ask(page, "Let me see.</think>Rome is old.")
        expect(column.get_by_role("group", name="Answer by cocoa-sig")).to_have_text("Rome is old.")
        thoughts = column.get_by_label("Reasoning")
        expect(thoughts).to_be_hidden()
        column.locator("summary").click()
        expect(thoughts).to_contain_text("Let me see.")
        assert problems == []


@pytest.mark.parametrize("text", [ROME, f"🙂 \u202e{ROME} 🙂"])
def test_a_finished_answer_shades_the_claims_to_check_and_nothing_else(page: Page, site: Site, text: str) -> None:
    column = ask(page, text)
    box, look = column.locator(".cocoa-text"), "one => getComputedStyle(one).textDecorationLine"
    expect(box).to_have_text(safe(text))
    answer = site.engine.chat([{"role": "user", "content": SAY + text}], max_new_tokens=400)
    checks = sorted(answer.check_these(), key=lambda one: one.start)
    assert any(answer.text[one.start : one.end] != "".join(answer.spans[at].text for at in one.spans) for one in checks)
    claims, spans = box.locator(".claim"), box.locator(".cocoa-span:not(.cocoa-level-0)").all()
    assert "".join(claims.all_text_contents()) == "".join(one.text for one in checks)
    levels = [RiskScale().level(one.risk) for one in checks for _ in one.spans]
    assert [one.get_attribute("class") for one in claims.all()] == [f"claim cocoa-level-{level}" for level in levels]
    assert {one.evaluate(look) for one in claims.all()} == {"underline"}
    assert {one.evaluate(look) for one in spans} == {"none"}
    page.check("#every")
    assert {one.evaluate(look) for one in claims.all()} == {"none"}
    assert {one.evaluate(look) for one in spans} == {"underline"}


def test_levels_have_marks_besides_their_colour_and_fields_have_labels(page: Page) -> None:
    column = ask(page, ROME)
    page.check("#every")
    style = """one => {
      const { textDecorationLine, textDecorationStyle, textDecorationThickness } = getComputedStyle(one);
      return [textDecorationLine, textDecorationStyle, textDecorationThickness];
    }"""
    shown = {level: column.locator(f".cocoa-span.cocoa-level-{level}").first.evaluate(style) for level in range(4)}
    assert shown[0][0] == "none"
    assert shown[1] == ["underline", "dotted", "1px"]
    assert shown[2] == ["underline", "solid", "2px"]
    assert shown[3] == ["underline", "solid", "4px"]
    assert page.locator("#levels li").all_inner_texts() == ["0 0.00–0.25", "1 0.25–0.50", "2 0.50–0.75", "3 0.75–1.00"]
    unlabelled = (
        "() => [...document.querySelectorAll('input, select, textarea')].filter((one) => !one.labels.length).length"
    )
    assert page.evaluate(unlabelled) == 0
    assert column.locator(".cocoa-verdict").get_attribute("role") == "status"
    assert page.locator("#problem").get_attribute("role") == "alert"
    assert page.locator("html").get_attribute("lang") == "en"
    expect(page.get_by_role("group", name="Answer by cocoa-sig")).to_have_text(ROME)
    expect(page.get_by_role("tooltip", include_hidden=True)).to_have_count(1)


def test_a_raw_mlds_has_no_levels(page: Page) -> None:
    column = ask(page, ROME, cocoa={"risk": "f_mlds"})
    expect(column.locator(".cocoa-verdict")).to_contain_text("not probabilities, so nothing is shaded")
    span = column.locator(".cocoa-span").nth(3)
    assert span.evaluate("one => getComputedStyle(one).textDecorationLine") == "none"
    span.hover()
    expect(page.locator("#card")).to_contain_text("competing candidates")
    assert "risk level" not in page.locator("#card").inner_text()
    expect(page.locator("#legend")).to_be_visible()
    expect(page.locator("#scale")).to_be_hidden()


def test_at_320_pixels_nothing_scrolls_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    page.reload()
    page.select_option("#compared", "greedy")
    column = ask(page, f"{'long' * 15} {ROME}")
    last = column.locator(".cocoa-text .cocoa-span").last
    last.focus()
    expect(page.locator("#card")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    box = page.locator("#card").bounding_box()
    assert box
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    inside = "() => { const card = document.getElementById('card'); return card.scrollWidth - card.clientWidth; }"
    assert page.evaluate(inside) <= 0  # the table of rivals fits
    ends = "() => [...document.querySelectorAll('main *')].map((one) => one.getBoundingClientRect().right)"
    assert max(page.evaluate(ends)) <= 320


CONTRASTS = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (color) => weights.reduce((sum, weight, i) => sum + weight * linear(channels(color)[i] / 255), 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!(own || one.matches("input, textarea, select")) || !one.checkVisibility() || one.disabled) continue;
    const colors = [light(getComputedStyle(one).color), light(behind(one))];
    const ratio = (Math.max(...colors) + 0.05) / (Math.min(...colors) + 0.05);
    found.push([ratio, `${one.tagName}.${one.className}#${one.id}`]);
  }
  return found;
}"""


def test_text_is_readable_in_light_and_dark(page: Page) -> None:
    schemes: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        column = ask(page, ROME)
        page.check("#every")
        column.locator(".cocoa-span.cocoa-level-3").first.focus()
        expect(page.locator("#card")).to_be_visible()
        contrasts = page.evaluate(CONTRASTS)
        names = " ".join(name for _, name in contrasts).replace(".", " ").replace("#", " ").split()
        assert {"cocoa-level-0", "cocoa-level-3"} <= set(names)
        assert [contrast for contrast in contrasts if contrast[0] < 4.5] == []
        background = page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")


def test_errors_are_shown(context: BrowserContext, site: Site) -> None:
    page, problems = watched(context, site.address)
    expect(page.locator("#model")).to_have_text("Model: obedient")
    page.fill("#question", "Who?")
    page.evaluate("document.getElementById('settings').open = true")
    for more, words in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        page.fill("#more", more)
        page.click("#ask")
        expect(page.locator("#problem")).to_contain_text(words)
    assert page.locator(".cocoa-answer").count() == 0
    assert problems == []
    verdict = ask(page, ROME, top_p=0.5).locator(".cocoa-verdict")
    expect(verdict).to_contain_text("No answer: top_p=0.5 is not supported")
    assert len(problems) == 1  # the browser itself writes that the status was 400
    expect(ask(page, ROME).locator(".cocoa-text")).to_have_text(ROME)
    context.set_offline(True)
    column = ask(page, ROME)
    expect(column.locator(".cocoa-verdict")).to_have_text("No answer: the server cannot be reached")
    assert column.locator(".cocoa-span").count() == 0


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


def test_without_a_clipboard_the_copy_is_shown(page: Page, site: Site) -> None:
    """As on a page that does not come over TLS, from another machine."""
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.reload()
    column = ask(page, ROME)
    column.get_by_role("button", name="Copy as curl").click()
    shown = column.get_by_label("The request as curl").input_value()
    assert shown.startswith(f"curl '{site.address}/v1/chat/completions'")
    assert SAY + ROME in shown


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
        page, _ = watched(context, address)
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
