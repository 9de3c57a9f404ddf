"""The command line ``cocoa``, a thin layer over the engine. One file per command."""

import gc
import sys

from cocoa_engine.memory import OF_COMMANDS


def main() -> None:
    """The entry point of the command ``cocoa``."""
    gc.set_threshold(*OF_COMMANDS)
    try:
        from cocoa_engine.cli.app import run
    except KeyboardInterrupt:  # during the imports, which take a while
        sys.exit(130)
    run()
