"""The README, the pages under docs/, and the blocks of code in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs._generate.parts import fill

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE_PAGES = sorted(page for page in DOCS.rglob("*.md") if "_generate" not in page.parts)
PAGES = [ROOT / "README.md", *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md") if (ROOT / name).exists())]
PAGES += SITE_PAGES

SHELLS = ("bash", "console", "sh", "shell")

_BLOCK = re.compile(
    r"(?:^ *<!-- not run:(?P<reason>.*?)-->\n\s*?)?"
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.DOTALL | re.MULTILINE,
)
_OPERATORS = {"|", "||", "&&", ";", "&"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: the first word after the fence.
        code: its text.
        line: where its text begins, from 1.
        reason: why it is not run; None if it is.
    """

    language: str
    code: str
    line: int
    reason: str | None


def name_of(page: Path) -> str:
    """The page for messages and test ids."""
    return page.relative_to(ROOT).as_posix()


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link into a page can name: its headings and its ids, those of generated parts too."""
    text = _BLOCK.sub("", fill(page.read_text(encoding="utf-8")))
    ids = [one for pair in re.findall(r"\{#([\w-]+)\b[^}]*\}| id=\"([^\"]+)\"", text) for one in pair if one]
    headings = re.findall(r"^#+ (.+?) *(?:\{#.*\})?$", re.sub(r"\]\([^)]*\)", "", text), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return frozenset([*ids, *(re.sub(r"[\s-]+", "-", one) for one in words)])


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=(found["info"].split() or [""])[0],
            code=re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            line=text.count("\n", 0, found.start("code")) + 1,
            reason=None if found["reason"] is None else found["reason"].strip(),
        )
        for found in _BLOCK.finditer(text)
    ]


def code_spans(page: Path) -> list[str]:
    """The code in the prose of a page, outside its blocks."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def command_lines(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block, each as its words, without redirections and variables set before it."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":  # the rest is output
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word in _OPERATORS:
                if command:
                    yield command
                command = []
            elif word in (">", ">>", "<"):
                command.append(">")
            elif command[-1:] == [">"]:
                command.pop()
            elif command or not re.fullmatch(r"\w+=.*", word):
                command.append(word)
