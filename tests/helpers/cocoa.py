"""The type of the fixtures that run the command line, and what becomes of a command."""

from collections.abc import Callable

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
