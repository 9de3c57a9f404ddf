"""Extraction of code from answers to the MBPP prompt, which asks for code between ``[PYTHON]`` and ``[/PYTHON]``."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import islice
from textwrap import dedent

_FENCE = re.compile(r"[ \t]*```+[^`]*")  # a whole line, with or without the name of a language
_MAX_PARTS = 500  # of one answer: a model that repeats itself writes hundreds of fences
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.Import, ast.ImportFrom)


def code_of(answer: str) -> str:
    """The code in an answer, up to the closing tag, without Markdown fences and the text around them.

    The prompt ends with the opening tag, so an answer often begins with code that ends at a fence. The candidates are
    the complete text, the text before each fence, and the text between two fences or after the last. The first
    candidate that is valid Python is returned, so a fence inside a docstring does not end the code. If none is valid,
    the result is the block of the first fence, or the complete text.
    """
    text = re.split(r"\[/PYTHON\]", answer, maxsplit=1, flags=re.IGNORECASE)[0]
    lines = re.sub(r"\[PYTHON\]", "\n```\n", text, flags=re.IGNORECASE).split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE.fullmatch(line)]
    code = next(filter(_is_code, islice(_parts(lines, fences), _MAX_PARTS)), None)
    if code is not None or not fences:
        return code or _joined(lines)
    return _joined(lines[fences[0] + 1 : fences[1] if len(fences) > 1 else None])


def defined_names(code: str) -> list[str]:
    """The functions and classes that code defines at its top level; none if it is not Python."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [one.name for one in statements if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def _parts(lines: list[str], fences: list[int]) -> Iterator[str]:
    """The candidates, the most likely first."""
    yield _joined(lines)
    for fence in fences:
        yield _joined(lines[:fence])
    for number, fence in enumerate(fences):
        for end in (*fences[number + 1 :], len(lines)):
            yield _joined(lines[fence + 1 : end])


def _joined(lines: list[str]) -> str:
    return dedent("\n".join(lines)).strip("\n")


def _is_code(text: str) -> bool:
    """Whether it is Python that defines something. One or two English words are also valid Python expressions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, a null byte, nested too deeply (both)
        return False
    return any(isinstance(statement, _DEFINES) for statement in ast.walk(tree))
