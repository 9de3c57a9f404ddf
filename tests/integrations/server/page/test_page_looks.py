"""What the page looks like: marks, widths, contrasts, labels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from cocoa_engine.rendering.highlights import RiskScale
from cocoa_engine.safe_text import safe
from tests.helpers.asked_page import ROME, Site, ask, watched
from tests.helpers.chromium import needs_chromium
from tests.helpers.obedient import SAY

pytestmark = [pytest.mark.slow, needs_chromium]


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


def test_at_320_pixels_nothing_scrolls_sideways(context: BrowserContext, site: Site) -> None:
    page, problems = watched(context)
    page.set_viewport_size({"width": 320, "height": 640})
    page.goto(site.address)
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
    assert problems == []


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(browser: Browser, site: Site, scheme: Any) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 900})
    page, problems = watched(context)
    page.goto(site.address)
    column = ask(page, ROME)
    page.check("#every")
    column.locator(".cocoa-span.cocoa-level-3").first.focus()
    expect(page.locator("#card")).to_be_visible()
    found = page.evaluate(CONTRASTS)
    assert {"cocoa-level-0", "cocoa-level-3"} <= set(
        " ".join(name for _, name in found).replace(".", " ").replace("#", " ").split()
    )
    assert [one for one in found if one[0] < 4.5] == []
    background = page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    assert problems == []
    context.close()
