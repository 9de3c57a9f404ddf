"""``python -m cocoa_engine.cli``."""

from cocoa_engine.cli import main

main()
