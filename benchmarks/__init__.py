"""Speed measurements: one file each, all of them by ``python -m benchmarks``, one by ``python -m benchmarks.NAME``."""
