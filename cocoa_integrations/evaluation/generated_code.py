"""The code in what a model wrote for the MBPP prompt, which asks for code between ``[PYTHON]`` and ``[/PYTHON]``."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import islice
from textwrap import dedent

_FENCE = re.compile(r"[ \t]*```+[^`]*")  # a whole line, with or without the name of a language
_TRIED = 500  # parts of one answer: a model that repeats itself writes hundreds of fences
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.Import, ast.ImportFrom)


def code_of(answer: str) -> str:
    """The code in an answer: up to the closing tag, without Markdown fences and the words around them.

    The prompt ends with the opening tag, so code often comes bare and is then closed by a fence. Of the whole text,
    what stands before a fence and what stands between two (or after the last), the first that is Python is taken: a
    fence within a docstring ends nothing. If none is, it is what the first fence opens, or the whole.
    """
    text = re.split(r"\[/PYTHON\]", answer, maxsplit=1, flags=re.IGNORECASE)[0]
    lines = re.sub(r"\[PYTHON\]", "\n```\n", text, flags=re.IGNORECASE).split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE.fullmatch(line)]
    code = next(filter(_is_code, islice(_parts(lines, fences), _TRIED)), None)
    if code is not None or not fences:
        return code or _joined(lines)
    return _joined(lines[fences[0] + 1 : fences[1] if len(fences) > 1 else None])


def _parts(lines: list[str], fences: list[int]) -> Iterator[str]:
    """What may be the code, the likeliest first."""
    yield _joined(lines)
    for fence in fences:
        yield _joined(lines[:fence])
    for place, fence in enumerate(fences):
        for end in (*fences[place + 1 :], len(lines)):
            yield _joined(lines[fence + 1 : end])


def _joined(lines: list[str]) -> str:
    return dedent("\n".join(lines)).strip("\n")


def _is_code(text: str) -> bool:
    """Whether it is Python that defines something; a word or two of English are an expression of Python too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the model's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no Python, a null byte, nested too deeply (both)
        return False
    return any(isinstance(statement, _DEFINES) for statement in ast.walk(tree))
