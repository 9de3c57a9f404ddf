"""``python -m benchmarks.gguf.memory``: memory of a process that answers from a small and from a large GGUF file."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.gguf import large
from benchmarks.gguf.process import ANSWER, EMPTY
from benchmarks.measure import child
from cocoa_engine.model.gguf_reader import GgufFile
from cocoa_engine.model.load_options import find_embedded_file

HEADER = (
    "| file | torch | and transformers' Llama | after loading | after an answer | after loading, without torch / file "
    "| after an answer, without torch / file |\n| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def row(file: Path, threads: int) -> str:
    """A row of the table: the second start of a process. The memory includes the pages of the file that were read."""
    empty = child("-c", EMPTY)
    argument = json.dumps([str(file), threads, "What is the capital of France?"])
    child("-c", ANSWER, argument)  # what the first start keeps is there from now on
    found = child("-c", ANSWER, argument)
    size = file.stat().st_size
    numbers = (size, empty["torch"], empty["transformers"], found["after_load"], found["after_answer"])
    ratios = ((found[name] - empty["torch"]) / size for name in ("after_load", "after_answer"))
    return " | ".join(["", *(f"{number / 1e6:,.0f} MB" for number in numbers), *(f"{each:.2f}" for each in ratios), ""])


def main() -> None:
    """Measure the embedded model's file and a random one of 7 billion weights, and print the table."""
    parser = argparse.ArgumentParser(description="Measures the memory of a process that answers from a GGUF file.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the large file of about 4 GB is written; default: temporary")
    options = parser.parse_args()
    small = find_embedded_file()
    if small is None:
        parser.error("the embedded model is not installed")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder) / "random-7b.gguf"
        large.write(file, GgufFile(small))
        print(HEADER)
        for each in (small, file):
            print(row(each, options.threads).strip())


if __name__ == "__main__":
    main()
