"""The command line of the suite, and of each single measurement."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from transformers.utils import logging

from benchmarks.measure import Bench, progress, record, write
from benchmarks.plots import draw
from benchmarks.probe import probe
from benchmarks.report import write_report
from benchmarks.settings import DOCS, MEASUREMENTS, RESULTS, Settings


def main(*only: str) -> None:
    """Run measurements, write a JSON file for each, and update the tables and the plot.

    Args:
        only: the measurements to run. Default: those of ``--only``, or else all.
    """
    parser = argparse.ArgumentParser(
        description="Measures the cost of decoding. Results: docs/explanation/performance.md."
    )
    if not only:
        parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--model", help="Hub name or folder; default: the embedded model")
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--tokens", type=int, default=Settings.tokens)
    parser.add_argument("--quick", action="store_true", help="minimal sizes, to try the suite; ignore the timings")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the JSON files (default: benchmarks/results); another folder also gets report and plot",
    )
    options = parser.parse_args()
    settings = Settings(model=options.model, threads=options.threads, rounds=options.rounds, tokens=options.tokens)
    if options.quick:
        settings = settings.quick()
    out: Path = options.out or (RESULTS / "quick" if options.quick else RESULTS)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with progress() as shown:
        bench = Bench(settings, shown)
        for name in only or options.only or MEASUREMENTS:
            before, start = probe(), time.perf_counter()
            values = import_module(f"benchmarks.{name}").measure(bench)
            seconds = round(time.perf_counter() - start)
            state = {"took_seconds": seconds, "machine_state": [before, probe()]}
            write(out / f"{name}.json", record(bench, {**state, **values}))

    in_place = out.resolve() == RESULTS
    draw(out, (DOCS if in_place else out) / "performance")
    table, console = write_report(out, in_place=in_place), Console()
    console.print(Markdown(table) if console.is_terminal else table, soft_wrap=not console.is_terminal, markup=False)
