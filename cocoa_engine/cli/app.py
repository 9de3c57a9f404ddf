"""The application with all commands. Errors are shown as one line, or with their traceback under ``--debug``."""

import codecs
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cocoa_engine import __version__
from cocoa_engine.cli.options import commands, load_command
from cocoa_engine.cli.output import Terminated, describe_error, print_note
from cocoa_engine.errors import safe
from cocoa_engine.risk import CalibrationWarning

INTERRUPTED, TERMINATED = 130, 143  # what a shell reports for a program that Ctrl-C or SIGTERM ended
_python_format = warnings.formatwarning


class OneLineErrors(TyperGroup):
    """A group of commands that turns exceptions into an exit code and one line on stderr.

    The module of a command is imported when the command or the list of all is asked for.
    """

    # Any: Typer passes click's Context and Command, newer versions those of their own copy of click

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys((*super().list_commands(ctx), *commands())))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return load_command(cmd_name) if command is None and cmd_name in commands() else command

    def main(self, args: Any = None, *_: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command line and exit. Without ``standalone_mode`` it returns or raises as Typer does."""
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **options)
        if os.environ.get("COLUMNS") == "0":  # not known; rich would print nothing
            del os.environ["COLUMNS"]
        # closed streams are replaced by the null device, and characters that a stream cannot encode by others
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
            # as files are read; in some locales, bytes that are not text would become lone surrogates
            is_utf_8 = codecs.lookup(sys.stdin.encoding).name == "utf-8"
            sys.stdin.reconfigure(encoding="utf-8-sig" if is_utf_8 else None, errors="strict")
        received: list[int] = []  # SIGTERM, which Typer takes for Ctrl-C
        try:
            with _sigterm_interrupts(received):
                code = super().main(args, standalone_mode=False, **options)
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # the reader has closed the pipe (`cocoa ask ... | head`)
            code = 1
        except Exception as error:
            if "--debug" in args:
                print(safe(traceback.format_exc()), end="", file=sys.stderr)
                code = 1
            else:
                message, code = describe_error(error)
                print_note(message)
        if code == INTERRUPTED:
            code = TERMINATED if received else INTERRUPTED
            print_note("interrupted")
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # of a closed pipe or a full disk: discard what Python would still flush
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _sigterm_interrupts(received: list[int]) -> Iterator[None]:
    """Let SIGTERM interrupt like Ctrl-C, and append it to a list. A second one ends the process at once."""

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread takes signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cocoa {__version__}")
        raise typer.Exit()


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def cocoa(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Ask a local language model, and see which parts of its answer may be wrong."""


def run() -> None:
    warnings.formatwarning = _as_one_line
    app(prog_name="cocoa")


def _as_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format this package's warnings like its errors, and others as Python does."""
    if issubclass(category, CalibrationWarning) and "--debug" not in sys.argv:
        return f"cocoa: warning: {safe(str(message))}\n"
    return safe(_python_format(message, category, filename, lineno, line))
