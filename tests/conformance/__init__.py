"""Suites that others wrote, run against ``cocoa serve`` on the real model: ``make conformance``."""
