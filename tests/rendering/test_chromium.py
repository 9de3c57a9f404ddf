"""The HTML in a real browser: drawn, in both themes, without a script, an error or a cut card."""

import io
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import Error, sync_playwright

from cocoa_engine import Candidate
from tests.helpers.chromium import FOUND, needs_chromium
from tests.helpers.made_up_answers import figures, generation

pytestmark = [needs_chromium, pytest.mark.slow]

Look = Callable[..., np.ndarray]

THEMES = {
    False: {"back": "#ffffff", "card": "#f7f8fa", "levels": ("#fff4c2", "#ffcf85", "#f59a8d")},
    True: {"back": "#16181d", "card": "#20242c", "levels": ("#3d3818", "#6d4a0b", "#a62f26")},
}
"""The colours of the light and of the dark theme."""

CANDIDATES = [Candidate(**figures(f" rival {number}", 0.9 - number / 100), is_greedy=not number) for number in range(8)]
SPANS = [("Nothing,", 0.10), (" little,", 0.30), (" more", 0.60), (" doubt,", 0.60), (" and rival 0", 0.90)]
LEVELS = generation(*SPANS, candidates=CANDIDATES)


LAST = re.findall(r'id="(cocoa-\w+-\d+)"', LEVELS.to_html())[4]
"""The id of the last span among the details."""
OPEN = f"#{LAST}-card {{ display: block !important; }}"


@pytest.fixture(scope="module")
def look() -> Iterator[Look]:
    """Opens a page and returns its picture, ``[height, width, 3]`` in 0..255. It may write nothing to the console."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=FOUND, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )

        def picture(
            html: str, *, dark: bool = False, focus: str = "", size: tuple[int, int] = (900, 600)
        ) -> np.ndarray:
            messages: list[str] = []
            page = browser.new_page(
                viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
            )
            page.on("console", lambda message: messages.append(message.text))
            page.set_content(html)
            if focus:
                page.focus(f"#{focus}")
            for attempts_left in (2, 1, 0):  # on a machine that does much else, a browser may draw nothing in time
                try:
                    shown = page.screenshot()
                    break
                except Error:
                    if not attempts_left:
                        raise
            pixels = imread(io.BytesIO(shown))[:, :, :3]
            page.close()
            assert messages == []
            return (pixels * 255).round().astype(int)

        yield picture
        browser.close()


def share(picture: np.ndarray, color: str) -> float:
    """How much of a picture has a colour, ``#rrggbb``, give or take what rounding does."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return float((abs(picture - wanted).max(axis=2) <= 2).mean())


def opened(html: str) -> str:
    """The page with its details unfolded."""
    return html.replace("<details>", "<details open>")


@pytest.mark.parametrize("dark", THEMES)
def test_levels_are_drawn_in_their_colours_and_a_focused_span_opens_its_card(look: Look, dark: bool) -> None:
    theme = THEMES[dark]
    picture = look(opened(LEVELS.to_html()), dark=dark)
    assert share(picture, theme["back"]) > 0.1
    assert all(share(picture, level) > 0.001 for level in theme["levels"])
    assert share(picture, theme["card"]) < 0.01
    assert share(look(opened(LEVELS.to_html()), dark=dark, focus=LAST), theme["card"]) > 0.1


@pytest.mark.parametrize(
    ("body", "dark"),
    [
        ('<body data-jp-theme-light="false">', True),
        ('<body data-jp-theme-light="true">', False),
        ('<body class="vscode-dark">', True),
        ('<body class="vscode-light">', False),
    ],
)
def test_a_notebooks_theme_decides(look: Look, body: str, dark: bool) -> None:
    page = f"<!DOCTYPE html><html><meta charset=utf-8>{body}{LEVELS._repr_html_()}</body></html>"
    assert share(look(page, dark=not dark), THEMES[dark]["back"]) > 0.05


@pytest.mark.parametrize("above", [0, 420])
@pytest.mark.parametrize("width", [900, 500])
def test_an_open_card_is_wholly_in_the_window(look: Look, width: int, above: int) -> None:
    style = f"{OPEN} html {{ overflow: hidden; }}"
    before = f'<body><style>{style}</style><div style="height:{above}px"></div>'
    picture = look(opened(LEVELS.to_html()).replace("<body>", before), size=(width, 1000))
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


def test_styles_of_the_page_and_of_the_answer_leave_each_other_alone(look: Look) -> None:
    page = "<!DOCTYPE html><html><meta charset=utf-8><style>{}</style><body><div class=house>{}</div>{}</body></html>"
    words = '<div class="house"><p>Some words</p><ul><li>and more</li></ul></div>'
    answer = opened(LEVELS._repr_html_())
    alone, styled = (look(page.format(style, answer, "")) for style in (OPEN, OPEN + HOUSE_STYLES))
    assert (alone == styled).all(axis=2).mean() > 0.999
    before, after = (look(page.format(HOUSE_STYLES, "", text)) for text in (words, words + answer))
    assert (before[:120] == after[:120]).all()
    assert (before[:120] != 255).any()
