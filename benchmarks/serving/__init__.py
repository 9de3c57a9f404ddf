"""The server under load: ``python -m benchmarks.serving``."""
