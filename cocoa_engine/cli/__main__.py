"""``python -m cocoa_engine.cli``."""

from cocoa_engine.cli.app import main

main()
