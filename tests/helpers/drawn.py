"""What is found in a page, and what a terminal shows."""

import io
from html.parser import HTMLParser

from rich.console import Console, RenderableType

VOID = {"meta"}


class Page(HTMLParser):
    """The elements of a page, well nested, and the text inside those of one class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, set[str]]] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[list[set[str]], str]] = []
        self.comments: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, set(attributes.get("class", "").split())))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(([classes for _, classes in self.open], data))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def text(self, wanted: str, *, without: str = "no such class") -> str:
        classes = ((set().union(*inside), data) for inside, data in self.texts)
        return "".join(data for inside, data in classes if wanted in inside and without not in inside)

    def of_class(self, wanted: str) -> list[dict[str, str]]:
        return [one for _, one in self.elements if wanted in one.get("class", "").split()]


def drawn(renderable: RenderableType, width: int = 80, color: bool = False) -> str:
    system = "truecolor" if color else None
    console = Console(file=io.StringIO(), width=width, color_system=system, force_terminal=True, no_color=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]
