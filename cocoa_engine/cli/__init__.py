"""The command line ``cocoa``: a thin face over the engine. One file per command."""

from cocoa_engine.cli.app import app, main

__all__ = ["app", "main"]
