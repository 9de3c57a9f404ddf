"""Ctrl-C in the middle of a command."""

import itertools
from typing import Any

import pytest


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Instead of a call of a function, by its number from 1; the calls after it are as before."""
    function, calls = getattr(owner, name), itertools.count(1)

    def until_ctrl_c(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(owner, name, until_ctrl_c)
