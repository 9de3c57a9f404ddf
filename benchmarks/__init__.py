"""Speed and quality measurements; each is one command, e.g. ``python -m benchmarks.decode_speed``."""
