"""``python -m benchmarks.gguf``: measure decoding on a GGUF file beside llama.cpp, and write the tables."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks.gguf import large, process, speed
from benchmarks.gguf.tables import PARTS
from benchmarks.measure import Bench, progress, record, write
from benchmarks.report import write_report
from benchmarks.settings import RESULTS, Settings
from cocoa_engine.model.load_options import find_embedded_file


def main() -> None:
    """Run the parts, and write ``gguf.json``."""
    parser = argparse.ArgumentParser(description="Measures decoding on the blocks of a GGUF file, beside llama.cpp.")
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python, for speed and large")
    parser.add_argument("--file", type=Path, help="GGUF file of the default model; default: the embedded one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--tokens", type=int, default=Settings.tokens)
    parser.add_argument("--quick", action="store_true", help="minimal sizes, to try it; ignore the timings")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gguf.json")
    options = parser.parse_args()
    if options.llama_python is None and set(options.only) - {"process"}:
        parser.error("--llama-python is needed for speed and large")
    settings = Settings(threads=options.threads, rounds=options.rounds, tokens=options.tokens)
    if options.quick:
        settings = settings.quick()
    file: Path | None = options.file
    if file is None:
        file = find_embedded_file()
        if file is None:
            parser.error("the embedded model is not installed; name a file with --file")
    path: Path = options.out / "gguf.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with progress() as shown, tempfile.TemporaryDirectory() as folder:
        bench = Bench(settings, shown)
        measures: dict[str, Any] = {
            "speed": lambda: speed.measure(bench, file, options.llama_python),
            "process": lambda: process.measure(bench, file),
            "large": lambda: large.measure(bench, file, Path(folder), options.llama_python),
        }
        for part in options.only:
            found[part] = record(bench, measures[part]())
            write(path, found)
    if options.out.resolve() == RESULTS:
        write_report(RESULTS, in_place=True)


if __name__ == "__main__":
    main()
