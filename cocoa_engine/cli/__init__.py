"""The command line ``cocoa``, a thin layer over the engine. One file per command."""

import atexit
import gc
import sys

from cocoa_engine.memory import OF_COMMANDS


def main() -> None:
    """The entry point of the command ``cocoa``."""
    gc.set_threshold(*OF_COMMANDS)
    atexit.register(gc.freeze)  # or the end would look through all that was imported, for half a second
    try:
        from cocoa_engine.cli.app import run
    except KeyboardInterrupt:  # during the imports, which take a while
        sys.exit(130)
    run()
