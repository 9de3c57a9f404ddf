"""The type of the fixtures that run the command line."""

from __future__ import annotations

from collections.abc import Callable

from typer.testing import Result

Cocoa = Callable[..., Result]
