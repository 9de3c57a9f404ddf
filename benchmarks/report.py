"""Writes the tables of ``docs/explanation/performance.md`` and of the README from the JSON of the measurements.

    python -m benchmarks.report

Each table is between the markers ``<!-- measured: NAME -->`` and ``<!-- end -->``. The other text does not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.bars import BARS, Record, check, compared
from benchmarks.decoding import KINDS
from benchmarks.gguf import tables as gguf
from benchmarks.markdown import comparison, cost, milliseconds, ratio_of, spread, state, table
from benchmarks.measure import BASE, BLOCKS, COCOA_SIG, GREEDY, LEAN, MODULES, RATIO_SETUPS
from benchmarks.serving import tables as serving
from benchmarks.settings import DOCS, MEASUREMENTS, RESULTS, ROOT
from cocoa_engine.lab.timing import Spread, one_line, ratio

Records = Mapping[str, Record]

PERFORMANCE = DOCS / "performance.md"
README = ROOT / "README.md"
OTHERS = ("serving", "gguf")
"""Records of measurements that are not part of the suite: see ``benchmarks.serving`` and ``benchmarks.gguf``."""
PARTS = ("load", "load_memory", "rival", "first_text", "memory", "kill", "readers", "speed", "process", "large")
NOT_MEASURED = "Not measured yet."
MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(folder: Path) -> dict[str, Record]:
    """The existing records of a folder, by measurement."""
    paths = {name: folder / f"{name}.json" for name in (*MEASUREMENTS, *OTHERS)}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def filled(text: str, records: Records) -> str:
    """A document with every table between markers updated."""

    def replaced(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}{written(name, records)}\n{end}"

    return MARKED.sub(replaced, text)


def written(name: str, records: Records) -> str:
    """The text of one table, or ``NOT_MEASURED`` if its measurement is missing."""
    try:
        text = TABLES[name](records)
        source = STATE_OF.get(name)
        return text if source is None else f"{text}\n\n{state(records[source])}"
    except KeyError as missing:
        if missing.args[0] in (*MEASUREMENTS, *OTHERS, *PARTS):
            return NOT_MEASURED
        raise


def write_report(folder: Path, *, in_place: bool) -> str:
    """Fill the documents from the JSON in a folder.

    Args:
        folder: the folder of the JSON files.
        in_place: write the project's documents; otherwise copies of them into the folder.

    Returns:
        The table of the targets, as Markdown.
    """
    records = read(folder)
    for path in (PERFORMANCE, README):
        target = path if in_place else folder / path.name
        target.write_text(filled(path.read_text(encoding="utf-8"), records), encoding="utf-8")
    return written("bars", records)


def _ratios(records: Records) -> str:
    def rows(group: Record) -> Iterator[Sequence[str]]:
        measured = group["comparison"]["competitors"]
        for setup in RATIO_SETUPS:
            greedy, cocoa_sig = (measured[f"{name}, {setup}"] for name in (GREEDY, COCOA_SIG))
            yield [
                setup,
                milliseconds(greedy),
                milliseconds(cocoa_sig),
                spread(ratio(cocoa_sig["seconds"], greedy["seconds"])),
                *cost(greedy, "fed_tokens"),
                *cost(cocoa_sig, "fed_tokens", "forward_passes"),
            ]

    headings = [
        "CoCoA engine greedy, ms per token",
        "CoCoA-SIG, ms",
        "CoCoA-SIG / CoCoA engine greedy",
        "greedy, tokens fed per token",
        "CoCoA-SIG, tokens fed per token",
        "CoCoA-SIG, passes per token",
    ]
    tables = []
    for name, group in records["ratio"]["groups"].items():
        tables.append(table([f"{group['questions']}: {name}", *headings], rows(group)))
        tables.append(state({**records["ratio"], **group}))
    return "\n\n".join(tables)


def _fed_tokens(records: Records) -> str:
    columns = records["fed_tokens"]["fed"]
    rows: Iterator[Sequence[str]] = (
        [title, *(f"{counts[kind]:.2f}" for counts in columns.values())] for kind, title in KINDS.items()
    )
    return table(["tokens fed per kept token", *columns], rows)


def _bars(records: Records) -> str:
    checked = {each.bar.what: each for each in check(records)}

    def rows() -> Iterator[Sequence[str]]:
        for bar in BARS:
            limit = f"{'≥' if bar.at_least else '≤'} {bar.limit:.2f}"
            if each := checked.get(bar.what):
                yield [bar.what, limit, spread(each.found), "yes" if each.met else "**no**"]
            else:
                yield [bar.what, limit, "not measured", ""]

    return table(["quantity", "target", "measured: median (lowest – highest)", "met"], rows())


def _decoding(records: Records) -> str:
    values = records["single_stream"]["decoding"]
    names = {
        "risk_points_per_token": "risk points per token",
        "candidates_per_risk_point": "candidates per risk point",
        "first_candidate_kept": "share of risk points at which the most probable first token is kept",
        "span_tokens_mean": "tokens of a kept candidate, mean",
        "span_tokens_p95": "tokens of a kept candidate, 95th percentile",
        "forward_passes_per_kept_token": "forward passes per kept token",
        "fed_per_kept_token": "tokens fed per kept token",
        "wasted_per_kept_token": "of these, fed and not kept",
        "prompts_apart_from_greedy": "share of prompts whose text differs from greedy's",
        "tokens_apart_from_greedy": "share of tokens with no counterpart in greedy's text",
    }
    values = {**values, "wasted_per_kept_token": values["fed_per_kept_token"] - 1}
    rows: Iterator[Sequence[str]] = (
        [name, "none" if values[key] is None else f"{values[key]:.2f}"] for key, name in names.items()
    )
    counted = f"{values['prompts']} prompts, {values['tokens']} tokens"
    return table([counted, ""], rows)


def _grown(comparisons: Mapping[str, Record], heading: str, *, per_step: bool = False) -> str:
    """A row for each size: times per token, and ratios of the engine's decoders to ``generate`` and to each other."""

    def rows() -> Iterator[Sequence[str]]:
        for size, found in comparisons.items():
            measured = found["competitors"]
            yield [
                f"{int(size):,}",
                *(milliseconds(measured[name]) for name in (BASE, GREEDY, COCOA_SIG)),
                *(ratio_of(measured[name]) for name in (GREEDY, COCOA_SIG)),
                spread(compared(found, COCOA_SIG, GREEDY)),
                *(_per_step(found["cocoa_sig_to_greedy"]) if per_step else []),
            ]

    headings = [
        heading,
        "HF greedy, ms per token",
        "CoCoA engine greedy, ms",
        "CoCoA-SIG, ms",
        "CoCoA engine greedy / HF",
        "CoCoA-SIG / HF",
        "CoCoA-SIG / CoCoA engine greedy",
        *(["CoCoA-SIG, passes per token", "CoCoA-SIG / CoCoA engine greedy, per pass"] if per_step else []),
    ]
    return table(headings, rows())


def _per_step(found: Record) -> list[str]:
    return [f"{found['steps_per_token'][COCOA_SIG]:.2f}", spread(Spread(**found["per_step"]))]


def _leaves(records: Records) -> str:
    lengths = records["leaves"]["lengths"]

    def rows() -> Iterator[Sequence[str]]:
        for leaves in next(iter(lengths.values()))["seconds"]:
            row = [leaves]
            for found in lengths.values():
                milliseconds = 1000 * Spread.of(found["seconds"][leaves]).median
                row += [f"{milliseconds:.1f}", spread(Spread(**found["to_one_leaf"][leaves]))]
            yield row

    headings = ["tokens fed"]
    for length in lengths:
        headings += [f"ms after {int(length):,}", "ratio to one"]
    return table(headings, rows())


def _candidates(records: Records) -> str:
    text = comparison(records["candidates"]["candidates"], "`max_candidates`")
    return text.replace("ratio to 1 ", "ratio to greedy ")


def _memory(records: Records) -> str:
    memory = records["prompt_length"]["memory"]

    def rows() -> Iterator[Sequence[str]]:
        for kind, name in {"key_value_bytes": "keys and values", "peak_bytes": "whole process, at its peak"}.items():
            sizes = [f"{Spread.of(found[kind]).median / 2**20:,.1f}" for found in memory["methods"].values()]
            yield [name, *sizes, spread(Spread(**memory["cocoa_sig_to_greedy"][kind]), 3)]

    prompt = f"prompt of {memory['length']:,} tokens"
    return table([prompt, "CoCoA engine greedy, MiB", "CoCoA-SIG, MiB", "ratio"], rows())


def _with_and_without(measured: Record, what: str, digits: int = 2) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for name, found in measured.items():
            steps = [f"{1000 * Spread.of(seconds).median:.2f}" for seconds in found["seconds"].values()]
            shown = f"{int(name):,}" if name.isdecimal() else name
            yield [shown, *steps, spread(Spread(**found["with_to_without"]), digits)]

    return table([what, "with, ms", "without, ms", "with / without"], rows())


def _scoring(records: Records) -> str:
    record = records["scoring"]
    rows = iter([[name, f"{1000 * Spread.of(values).median:.1f}"] for name, values in record["seconds"].items()])
    return (
        table([f"{record['answers']} answers to a prompt of {record['prompt_tokens']} tokens", "ms per answer"], rows)
        + f"\n\nTimes faster: {spread(Spread(**record['times_faster']))}. Times the prompt was read: "
        f"{record['prompt_reads']}."
    )


def _startup(records: Records) -> str:
    steps = records["startup"]["steps"]
    rows: Iterator[Sequence[str]] = (
        [name, spread(Spread(step["median"], step["lowest"], step["highest"]))] for name, step in steps.items()
    )
    return table(["step", "seconds"], rows)


def _contention(records: Records) -> str:
    record = records["contention"]
    states = {"idle": "none", "busy": f"{record['busy_processes']} busy processes"}

    def rows() -> Iterator[Sequence[str]]:
        for key, name in states.items():
            found = record["states"][key]
            for decoder, one in found["competitors"].items():
                speed = [spread(Spread(**found["machine_speed"][unit]), 0) for unit in ("gb_per_s", "gflop_per_s")]
                yield [name, decoder, milliseconds(one), ratio_of(one), *speed]

    return table(["other work", "decoder", "ms per token", f"ratio to {record['base']}", "GB/s", "GFLOP/s"], rows())


def _machine(records: Records) -> str:
    """A line for each machine and setting of the records; a single line if all records have the same."""
    lines = {
        f"{record['model']}, {record['dtype']}, {record['forward']} forward pass and {record['linears']} linear layers "
        f"unless stated otherwise, at most {record['settings']['tokens']} new tokens. "
        f"{one_line(record['machine'])}.": None
        for name, record in records.items()
        if name in MEASUREMENTS and name != "fed_tokens"  # counts
    }
    return "\n".join(lines) or NOT_MEASURED


def _readme(records: Records) -> str:
    measured = records["single_stream"]["comparison"]["competitors"]
    names = {
        BASE: "Hugging Face `generate`, greedy",
        f"{GREEDY}, {BLOCKS}": "CoCoA engine, greedy",
        f"{COCOA_SIG}, {BLOCKS}": "CoCoA-SIG",
        f"{GREEDY}, {LEAN}": "CoCoA engine, greedy, float32 weights",
        f"{COCOA_SIG}, {LEAN}": "CoCoA-SIG, float32 weights",
        f"{GREEDY}, {MODULES}": "CoCoA engine, greedy, other architectures¹",
        f"{COCOA_SIG}, {MODULES}": "CoCoA-SIG, other architectures¹",
    }

    def rows() -> Iterator[Sequence[str]]:
        for decoder, name in names.items():
            if decoder in measured:  # there are no blocks of other models
                yield [name, ratio_of(measured[decoder])]
        for size in ("4", "8"):
            if batch := records["batch"]["sizes"].get(size):
                yield [f"CoCoA-SIG, batch of {size}²", ratio_of(batch["competitors"][COCOA_SIG])]

    machine = records["single_stream"]["machine"]
    return (
        table(["time per token, one answer at a time", "ratio: median (lowest – highest)"], rows())
        + f"\n\n{records['single_stream']['model']} on {machine['torch_threads']} threads of {machine['processor']}. "
        "¹ the same model run through Hugging Face's modules, as those outside the Llama family are; "
        "² against `generate` on the padded batch."
    )


def _precision(records: Records) -> str:
    measured = records["precision"]
    change = measured["change"]
    names = {
        "texts_alike": "share of answers with the same tokens",
        "tokens_before_the_first_other_one": "tokens before the first one that differs, mean",
        "f_mlds_apart": "difference of fMLDS, the same spans, mean",
        "con_mlds_apart": "difference of ConMLDS, the same spans, mean",
        "log_prob_per_token_apart": "difference of log p per token, the same spans, mean",
    }
    rows: Iterator[Sequence[str]] = (
        [name, *(f"{of[key]:.1f}" if key.startswith("tokens") else f"{of[key]:.4f}" for of in change.values())]
        for key, name in names.items()
    )
    return comparison(measured["comparison"], "weights") + "\n\n" + table(["change from float32", *change], rows)


STATE_OF = {
    "single_stream": "single_stream",
    "further_decoders": "single_stream",
    "readme": "single_stream",
    **{name: name for name in ("context", "prompt_length", "leaves", "batch", "candidates", "capture")},
    **{name: name for name in ("source_attention", "precision", "scoring", "startup", "contention")},
}
"""Tables of times, and the measurement whose state of the machine is written below each."""

TABLES: dict[str, Callable[[Records], str]] = {
    "bars": _bars,
    "single_stream": lambda records: comparison(records["single_stream"]["comparison"]),
    "further_decoders": lambda records: comparison(records["single_stream"]["further"]),
    "decoding": _decoding,
    "ratio": _ratios,
    "fed_tokens": _fed_tokens,
    "context": lambda records: comparison(records["context"]["comparison"]),
    "prompt_length": lambda records: _grown(records["prompt_length"]["lengths"], "prompt tokens", per_step=True),
    "leaves": _leaves,
    "memory": _memory,
    "batch": lambda records: _grown(records["batch"]["sizes"], "batch"),
    "candidates": _candidates,
    "capture": lambda records: _with_and_without(records["capture"]["forwards"], "forward pass"),
    "source_attention": lambda records: _with_and_without(records["source_attention"]["lengths"], "prompt tokens", 3),
    "precision": _precision,
    "scoring": _scoring,
    "startup": _startup,
    "contention": _contention,
    "machine": _machine,
    "readme": _readme,
    **serving.TABLES,
    **gguf.TABLES,
}


if __name__ == "__main__":
    print(write_report(RESULTS, in_place=True))
