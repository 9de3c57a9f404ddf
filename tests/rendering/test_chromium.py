"""The HTML in a real browser: drawn, in both themes, without a script, an error or a cut card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cocoa_engine import Candidate, Generation
from tests.helpers.chromium import Browser, needs_chromium, share
from tests.helpers.made_up_answers import figures, generation

pytestmark = [needs_chromium, pytest.mark.slow]

DARK = "--blink-settings=preferredColorScheme=0"
LIGHT_BACK, DARK_BACK = "#ffffff", "#16181d"
LIGHT_CARD, DARK_CARD = "#f7f8fa", "#20242c"
LIGHT_LEVELS = ("#fff4c2", "#ffcf85", "#f59a8d")
DARK_LEVELS = ("#3d3818", "#6d4a0b", "#a62f26")
CANDIDATES = [Candidate(**figures(f" rival {number}", 0.9 - number / 100), is_greedy=not number) for number in range(8)]
SPANS = [("Nothing,", 0.10), (" little,", 0.30), (" more", 0.60), (" doubt,", 0.60), (" and rival 0", 0.90)]
LEVELS = generation(*SPANS, candidates=CANDIDATES)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("chromium"))


def written(folder: Path, html: str) -> Path:
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    return page


def name_of_span(one: Generation, number: int) -> str:
    """A span among the details, by its number from 0."""
    return re.findall(r'id="(cocoa-\w+-\d+)"', one.to_html())[number]


def opened(html: str) -> str:
    """The page with its details unfolded."""
    return html.replace("<details>", "<details open>")


@pytest.mark.parametrize(
    ("theme", "back", "levels"), [((), LIGHT_BACK, LIGHT_LEVELS), ((DARK,), DARK_BACK, DARK_LEVELS)]
)
def test_levels_are_drawn_in_their_colours(
    browser: Browser, tmp_path: Path, theme: tuple[str, ...], back: str, levels: tuple[str, ...]
) -> None:
    picture = browser.screenshot(written(tmp_path, opened(LEVELS.to_html())), *theme)
    assert share(picture, back) > 0.1
    for level in levels:
        assert share(picture, level) > 0.001


@pytest.mark.parametrize(
    ("body", "theme", "back"),
    [
        ('<body data-jp-theme-light="false">', (), DARK_BACK),
        ('<body data-jp-theme-light="true">', (DARK,), LIGHT_BACK),
        ('<body class="vscode-dark">', (), DARK_BACK),
        ('<body class="vscode-light">', (DARK,), LIGHT_BACK),
    ],
)
def test_a_notebooks_theme_decides(
    browser: Browser, tmp_path: Path, body: str, theme: tuple[str, ...], back: str
) -> None:
    page = written(tmp_path, f"<!DOCTYPE html><html><meta charset=utf-8>{body}{LEVELS._repr_html_()}</body></html>")
    assert share(browser.screenshot(page, *theme), back) > 0.05


def test_a_focused_span_opens_its_card(browser: Browser, tmp_path: Path) -> None:
    page = written(tmp_path, opened(LEVELS.to_html()))
    assert share(browser.screenshot(page), LIGHT_CARD) < 0.01
    assert share(browser.screenshot(page, fragment=name_of_span(LEVELS, 4)), LIGHT_CARD) > 0.1
    assert share(browser.screenshot(page, DARK, fragment=name_of_span(LEVELS, 4)), DARK_CARD) > 0.1


@pytest.mark.parametrize("above", [0, 420])
@pytest.mark.parametrize("width", [900, 500])
def test_an_open_card_is_wholly_in_the_window(browser: Browser, tmp_path: Path, width: int, above: int) -> None:
    style = f"#{name_of_span(LEVELS, 4)}-card {{ display: block !important; }} html {{ overflow: hidden; }}"
    before = f'<body><style>{style}</style><div style="height:{above}px"></div>'
    html = opened(LEVELS.to_html()).replace("<body>", before)
    picture = browser.screenshot(written(tmp_path, html), size=(width, 1000))
    card = (picture == (0xF7, 0xF8, 0xFA)).all(axis=2)
    rows, columns = (numbers.nonzero()[0] for numbers in (card.sum(axis=1) > 100, card.sum(axis=0) > 50))
    top, bottom, left, right = rows.min(), rows.max(), columns.min(), columns.max()
    assert bottom - top > 150
    row, column = (top + bottom) // 2, (left + right) // 2
    sides = picture[: top + 1, column], picture[bottom:, column], picture[row, : left + 1], picture[row, right:]
    assert all((side == (0x5B, 0x60, 0x6B)).all(axis=1).any() for side in sides)  # its whole border is there


# as JupyterLab has them, and worse
HOUSE_STYLES = """
.house table { border-collapse: separate; border: 3px solid; color: red; table-layout: fixed; margin: 3em }
.house td, .house th, .house tr { vertical-align: middle; padding: 0.5em; white-space: normal; border: 1px solid }
.house tbody tr:nth-child(odd) { background: #f5f5f5 }
.house td { text-align: left; text-align-last: left }
.house p { text-align: right; margin: 0 0 2em; color: green }
.house ul:not(.list-inline) { padding-left: 2em; margin: 2em; list-style: disc }
.house dl dt { float: left; width: 20% }
.house dl { margin: 2em }
.house { font: italic 14px/2 serif; text-align: center; color: blue }
"""


def test_styles_of_the_page_and_of_the_answer_leave_each_other_alone(browser: Browser, tmp_path: Path) -> None:
    style = f"#{name_of_span(LEVELS, 4)}-card {{ display: block !important; }}"
    page = "<!DOCTYPE html><html><meta charset=utf-8><style>{}</style><body><div class=house>{}</div>{}</body></html>"
    words = '<div class="house"><p>Some words</p><ul><li>and more</li></ul></div>'
    alone = browser.screenshot(written(tmp_path, page.format(style, opened(LEVELS._repr_html_()), "")))
    styled = browser.screenshot(written(tmp_path, page.format(style + HOUSE_STYLES, opened(LEVELS._repr_html_()), "")))
    assert (alone == styled).all(axis=2).mean() > 0.999
    before = browser.screenshot(written(tmp_path, page.format(HOUSE_STYLES, "", words)))
    after = browser.screenshot(written(tmp_path, page.format(HOUSE_STYLES, "", words + opened(LEVELS._repr_html_()))))
    assert (before[:120] == after[:120]).all()
    assert (before[:120] != 255).any()
