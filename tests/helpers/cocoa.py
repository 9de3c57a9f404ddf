"""The type of the fixtures that run the command line, what becomes of a command, and Ctrl-C in the middle of one."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

Cocoa = Callable[..., Result]


def successful(result: Result) -> Result:
    """The same result, of a command that may not fail."""
    assert result.exit_code == 0, result.output
    return result


def assert_refused(result: Result, words: str, *, lines: int | None = None) -> None:
    """The command says these words on stderr, in some number of lines if that counts."""
    said = result.stderr.count("\n")
    assert (result.exit_code, said) == (2, said if lines is None else lines), result.output
    assert words in " ".join(result.stderr.split())


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Instead of a call of a function, by its number from 1; the calls after it are as before."""
    function, calls = getattr(owner, name), itertools.count(1)

    def until_ctrl_c(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(owner, name, until_ctrl_c)
