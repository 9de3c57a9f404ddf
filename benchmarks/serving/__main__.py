"""``python -m benchmarks.serving``: measure the server under load, and write the tables of the performance page."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import write
from benchmarks.probe import probe
from benchmarks.report import write_report
from benchmarks.serving import load, rival
from benchmarks.serving.tables import PARTS
from benchmarks.settings import RESULTS
from cocoa_engine.lab.timing import describe


def main() -> None:
    """Run the parts, and write ``serving.json``."""
    parser = argparse.ArgumentParser(description="Measures the server under load, on this machine.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long 64 streams go on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="max_tokens of a request")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process")
    parser.add_argument("--max-batch-size", type=int, default=8, help="that of the server under 64 streams")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of serving.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # for the description of the machine and its state
    path: Path = options.out / "serving.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder, tokens, threads = Path(name), options.tokens, options.threads
        under_load = (options.minutes, options.rounds, tokens, threads, options.max_batch_size, folder)
        measures: dict[str, Any] = {
            "load": lambda: load.measure(*under_load),
            "load_memory": lambda: load.memory(*under_load),
            "rival": lambda: rival.measure(options.rounds, tokens, threads, folder),
        }
        for part in options.only:
            before = probe()
            measured = measures[part]()
            found[part] = {**measured, "machine": describe(), "machine_state": [before, probe()]}
            write(path, found)
            print(json.dumps({part: found[part]}, indent=1), flush=True)
    if options.out.resolve() == RESULTS:
        write_report(RESULTS, in_place=True)


if __name__ == "__main__":
    main()
