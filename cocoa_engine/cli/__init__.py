"""The command line ``cocoa``: a thin face over the engine. One file per command."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of the command ``cocoa``."""
    try:
        from cocoa_engine.cli.app import run
    except KeyboardInterrupt:  # while the imports take their time
        sys.exit(130)
    run()
