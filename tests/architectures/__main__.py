"""Compares the engine with the reference on a small model of every architecture, and writes the table of the page.

    python -m tests.architectures [--resume] [NAME ...]

With names only these are compared, and nothing is written.
"""

import argparse
import json
import logging
import multiprocessing
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from cocoa_engine.errors import safe, shortened
from cocoa_engine.model.gguf_families import FAMILIES, UNPACKED
from tests.architectures.small_configs import MODEL_TYPES, WITH_IMAGES
from tests.architectures.sweep import Outcome, examine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/architectures.md"
RESULTS = ROOT / ".architectures.jsonl"  # the outcomes of the last run, so that an interrupted one can be resumed
MARKED = re.compile(r"(<!-- measured: architectures -->\n).*?(<!-- end -->)", re.DOTALL)

MEMORY = 6 * 2**30
"""Bytes of address space of a process. The default sizes of a field that is not shrunk would exceed them."""
CPU_SECONDS, SECONDS = 200, 900
"""Of an idle processor, and by the clock: other work may share the machine."""

FAST = {
    **dict.fromkeys(("shared_cache/static_lean", "shared_cache/lean"), "lean pass"),
    "shared_cache/modules": "modules",
    "shared_cache/masked_modules": "masked modules",
}
PATHS = {**FAST, "copied_cache/plain": "copied cache", "recompute/plain": "recompute"}


def main() -> int:
    """Run the comparison. Returns 1 if the engine was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "names", nargs="*", choices=[*MODEL_TYPES, *WITH_IMAGES, []], metavar="NAME", help="default: all"
    )
    parser.add_argument("--resume", action="store_true", help="keep the outcomes of an interrupted run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    logging.disable(logging.WARNING)

    outcomes: list[Outcome] = []
    if options.resume and RESULTS.exists():
        outcomes = [Outcome(**json.loads(line)) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    elif not options.names:
        RESULTS.unlink(missing_ok=True)
    done, start = {outcome.model_type for outcome in outcomes}, time.monotonic()
    for outcome in examine_each(options.names or [name for name in (*MODEL_TYPES, *WITH_IMAGES) if name not in done]):
        outcomes.append(outcome)
        line = f"{outcome.model_type:28} {outcome.verdict:14} {outcome.backend:28} {outcome.reason[:120]}"
        print(f"{len(outcomes):4}  {line}", flush=True)
        if not options.names:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    print("\n".join(["", *counts(outcomes), "", f"{(time.monotonic() - start) / 60:.0f} minutes"]))
    if not options.names:
        text = PAGE.read_text(encoding="utf-8")
        made = MARKED.sub(lambda match: f"{match[1]}{document(outcomes)}\n{match[2]}", text)
        PAGE.write_text(made, encoding="utf-8")
    return int(any(outcome.verdict in ("different", "failed") for outcome in outcomes))


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
        return Outcome(**json.loads(ours.recv_bytes()))
    except EOFError:
        process.join(timeout=SECONDS)
        return Outcome(name, "failed", reason=f"its process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join(timeout=SECONDS)
        ours.close()


def _work(name: str, pipe: Connection) -> None:
    limits = {resource.RLIMIT_AS: MEMORY, resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    pipe.send_bytes(json.dumps(asdict(examine(name))).encode())


def document(outcomes: Sequence[Outcome]) -> str:
    """The counts, then a table of Markdown with one row for each architecture."""
    rows = ["| architecture | class | run by | result | source attention |", "| --- | --- | --- | --- | --- |"]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.model_type):
        result = f"{outcome.verdict}: {safe(shortened(outcome.reason, 220)).replace('|', '/')}"
        if outcome.verdict == "equal":
            result = "equal in float64; float32 rounds more" if outcome.in_float64 else "equal"
        model_class = outcome.model_class.replace("_", r"\_") or "–"
        path, attention = PATHS.get(outcome.backend, "–"), outcome.attention or "–"
        rows.append(f"| {outcome.model_type} | {model_class} | {path} | {result} | {attention} |")
    return "\n".join([*counts(outcomes), "", *of_gguf_files(), "", *rows])


def of_gguf_files() -> list[str]:
    """The architectures of GGUF files that are read, as a list of Markdown."""
    ours, theirs = (", ".join(f"`{name}`" for name in sorted(names)) for names in (FAMILIES, UNPACKED))
    return [
        f"Architectures of GGUF files (`general.architecture`), {date.today()}:",
        "",
        f"- in their blocks: {ours};",
        f"- unpacked by transformers: {theirs};",
        "- all others are refused. Use the model's checkpoint, if its architecture is equal below.",
    ]


def counts(outcomes: Sequence[Outcome]) -> list[str]:
    """How many architectures had each outcome, as a list of Markdown."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    equal = [outcome for outcome in outcomes if outcome.verdict == "equal"]
    attention = Counter(outcome.attention for outcome in equal)
    paths = Counter(PATHS.get(outcome.backend) for outcome in equal)
    ways = [path for path in dict.fromkeys(PATHS.values()) if paths[path]]
    fast = ", ".join(f"{paths[path]} by the {path}" for path in ways if path in FAST.values())
    slow = ", ".join(f"{paths[path]} by {path}" for path in ways if path not in FAST.values())
    return [
        f"transformers {transformers_version}: {len(outcomes)} architectures.",
        "",
        f"- **{len(equal)} equal** to the reference: {fast}; slower: {slow}.",
        f"- Source attention is measured in {attention['seen']} of them, and equal to the attention weights; "
        f"{attention['none']} have no attention to the whole prompt.",
        f"- **{verdicts['refused']} refused** with one error.",
        f"- **{verdicts['different'] + verdicts['failed']} different or failed.**",
        f"- **{verdicts['no reference']} without a reference**: the engine runs them, and a plain forward pass of the "
        "model gives no hidden states to compare with.",
        f"- **{verdicts['not buildable']} not buildable**: transformers cannot build or run one in the sizes of this "
        "comparison.",
    ]


if __name__ == "__main__":
    sys.exit(main())
