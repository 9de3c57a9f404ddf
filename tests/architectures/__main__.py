"""Compares the engine with the reference on a small model of every architecture, and writes the table of the page.

    python -m tests.architectures [--resume] [NAME ...]

With names only these are compared, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from tests.architectures.small_configs import MODEL_TYPES
from tests.architectures.sweep import Outcome, examine
from tests.architectures.table import counts, document

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/architectures.md"
RESULTS = ROOT / ".architectures.jsonl"
"""The outcomes of the last run, so that an interrupted one can be resumed."""

MEMORY = 6 * 2**30
"""Bytes of address space of a process. The default sizes of a field that is not shrunk would exceed them."""

CPU_SECONDS = 200
SECONDS = 900
"""Of an idle processor, and by the clock: other work may share the machine."""

MARKED = re.compile(r"(<!-- measured: architectures -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Run the comparison. Returns 1 if the engine was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[*MODEL_TYPES, []], metavar="NAME", help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes of an interrupted run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    logging.disable(logging.WARNING)

    done: dict[str, Outcome] = {}
    if options.resume and RESULTS.exists():
        done = {one.model_type: one for one in map(_read, RESULTS.read_text(encoding="utf-8").splitlines())}
    elif not options.names:
        RESULTS.unlink(missing_ok=True)
    names = options.names or [name for name in MODEL_TYPES if name not in done]
    start = time.monotonic()
    for one in examine_each(names):
        done[one.model_type] = one
        print(f"{len(done):4}  {one.model_type:28} {one.verdict:14} {one.backend:28} {one.reason[:120]}", flush=True)
        if not options.names:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one.as_dict()) + "\n")
    outcomes = list(done.values())
    print("\n".join(["", *counts(outcomes), "", f"{(time.monotonic() - start) / 60:.0f} minutes"]))
    if not options.names:
        text = PAGE.read_text(encoding="utf-8")
        made = MARKED.sub(lambda match: f"{match[1]}{document(outcomes)}\n{match[2]}", text)
        PAGE.write_text(made, encoding="utf-8")
    return int(any(one.verdict in ("different", "failed") for one in outcomes))


def _read(line: str | bytes) -> Outcome:
    return Outcome(**json.loads(line))


def examine_each(model_types: Iterable[str]) -> Iterator[Outcome]:
    """The outcome of each architecture, in the order in which they are done, two at once."""
    with ThreadPoolExecutor(2) as pool:
        for done in as_completed([pool.submit(_examined, name) for name in model_types]):
            yield done.result(timeout=SECONDS)


def _examined(name: str) -> Outcome:
    """The outcome of an architecture in a process of its own, with limits of memory and time.

    It is forked: importing transformers would take longer than the comparison. No engine exists in this process, and
    torch computes with one thread.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return Outcome(name, "failed", reason=f"not done after {SECONDS} seconds")
        return _read(ours.recv_bytes())
    except EOFError:
        process.join(timeout=SECONDS)
        return Outcome(name, "failed", reason=f"its process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join(timeout=SECONDS)
        ours.close()


def _work(name: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send_bytes(json.dumps(examine(name).as_dict()).encode())


if __name__ == "__main__":
    sys.exit(main())
