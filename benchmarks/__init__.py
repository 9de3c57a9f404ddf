"""The benchmark suite. ``python -m benchmarks`` runs every measurement, ``python -m benchmarks.NAME`` a single one."""
