"""Writes the tables of ``docs/explanation/performance.md`` and of the README from the JSON of the measurements.

    python -m benchmarks.report

Each table is between the markers ``<!-- measured: NAME -->`` and ``<!-- end -->``. The other text does not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.bars import BARS, Bar, Record, check, compared
from benchmarks.gguf import tables as gguf
from benchmarks.markdown import comparison, milliseconds, ratio_of, spread, state, table
from benchmarks.measure import BASE, BLOCKS, COCOA_SIG, GREEDY, LEAN, MODULES, RATIO_SETUPS
from benchmarks.serving import tables as serving
from benchmarks.settings import DOCS, MEASUREMENTS, RESULTS, ROOT
from cocoa_engine.lab.timing import Spread, one_line

Records = Mapping[str, Record]

PERFORMANCE = DOCS / "performance.md"
README = ROOT / "README.md"
OTHERS = ("serving", "gguf")
"""Records of measurements that are not part of the suite: see ``benchmarks.serving`` and ``benchmarks.gguf``."""
PARTS = (*serving.PARTS, *gguf.PARTS)
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
        return TABLES[name](records)
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
        The table of all targets, as Markdown.
    """
    records = read(folder)
    for path in (PERFORMANCE, README):
        target = path if in_place else folder / path.name
        target.write_text(filled(path.read_text(encoding="utf-8"), records), encoding="utf-8")
    return targets(records)


def _ratios(records: Records) -> str:
    groups = records["ratio"]["groups"]

    def rows() -> Iterator[Sequence[str]]:
        for setup in RATIO_SETUPS:
            names = (f"{COCOA_SIG}, {setup}", f"{GREEDY}, {setup}")
            yield [setup, *(spread(compared(group["comparison"], *names)) for group in groups.values())]

    headings = [f"{group['questions']}: {name}" for name, group in groups.items()]
    return table(["CoCoA-SIG / CoCoA engine greedy", *headings], rows())


def targets(records: Records) -> str:
    """A table of all targets."""
    checked = {each.bar.what: each for each in check(records)}

    def rows() -> Iterator[Sequence[str]]:
        for bar in BARS:
            if each := checked.get(bar.what):
                yield [*_target(bar), spread(each.found), "yes" if each.met else "**no**"]
            else:
                yield [*_target(bar), "not measured", ""]

    return table(["quantity", "target", "measured: median (lowest – highest)", "met"], rows())


def _missed(records: Records) -> str:
    """The targets that are not met."""
    checked = list(check(records))
    missed = [each for each in checked if not each.met]
    rows = ([*_target(each.bar), spread(each.found)] for each in missed)
    return (
        f"{len(checked) - len(missed)} of {len(checked)} targets are met. The others:\n\n"
        f"{table(['quantity', 'target', 'measured: median (lowest – highest)'], rows)}"
    )


def _target(bar: Bar) -> list[str]:
    return [bar.what, f"{'≥' if bar.at_least else '≤'} {bar.limit:.2f}"]


def _decoding(records: Records) -> str:
    values = records["single_stream"]["decoding"]
    names = {
        "risk_points_per_token": "risk points per token",
        "candidates_per_risk_point": "candidates per risk point",
        "first_candidate_kept": "share of risk points at which the most probable first token is kept",
        "span_tokens_mean": "tokens of a kept candidate, mean",
        "tokens_apart_from_greedy": "share of tokens with no counterpart in greedy's text",
    }
    rows: Iterator[Sequence[str]] = (
        [name, "none" if values[key] is None else f"{values[key]:.2f}"] for key, name in names.items()
    )
    counted = f"{values['prompts']} prompts, {values['tokens']} tokens"
    return table([counted, ""], rows)


def _grown(comparisons: Mapping[str, Record], heading: str, *, per_step: bool = False) -> str:
    """A row for each size: the time of ``generate``, and ratios of the engine's decoders to it and to each other."""

    def rows() -> Iterator[Sequence[str]]:
        for size, found in comparisons.items():
            measured = found["competitors"]
            yield [
                f"{int(size):,}",
                milliseconds(measured[BASE]),
                *(ratio_of(measured[name]) for name in (GREEDY, COCOA_SIG)),
                spread(compared(found, COCOA_SIG, GREEDY)),
                *(_per_step(found["cocoa_sig_to_greedy"]) if per_step else []),
            ]

    headings = [
        heading,
        "HF greedy, ms per token",
        "CoCoA engine greedy / HF",
        "CoCoA-SIG / HF",
        "CoCoA-SIG / CoCoA engine greedy",
        *(["CoCoA-SIG, passes per token", "CoCoA-SIG / CoCoA engine greedy, per pass"] if per_step else []),
    ]
    return table(headings, rows())


def _per_step(found: Record) -> list[str]:
    return [f"{found['steps_per_token'][COCOA_SIG]:.2f}", spread(Spread(**found["per_step"]))]


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


def _capture(records: Records) -> str:
    forwards = records["capture"]["forwards"]

    def rows() -> Iterator[Sequence[str]]:
        for name, found in forwards.items():
            steps = [f"{1000 * Spread.of(seconds).median:.2f}" for seconds in found["seconds"].values()]
            yield [name, *steps, spread(Spread(**found["with_to_without"]))]

    return table(["forward pass", "with, ms", "without, ms", "with / without"], rows())


def _source_attention(records: Records) -> str:
    lengths = records["source_attention"]["lengths"]

    def rows() -> Iterator[Sequence[str]]:
        for length in filter(str.isdecimal, lengths):
            keys = (length, f"{int(length):,}, {MODULES}")
            yield [f"{int(length):,}", *(spread(Spread(**lengths[key]["with_to_without"]), 3) for key in keys)]

    return table(["prompt tokens", *(f"with / without, {name}" for name in (LEAN, MODULES))], rows())


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
    states = {"idle": "alone", "busy": f"beside {record['busy_processes']} busy processes"}

    def rows() -> Iterator[Sequence[str]]:
        for decoder in record["states"]["idle"]["competitors"]:
            measured = [record["states"][state]["competitors"][decoder] for state in states]
            yield [decoder, *(cell for one in measured for cell in (milliseconds(one), ratio_of(one)))]
        for unit, speed in {"gb_per_s": "a copy, GB/s", "gflop_per_s": "a matrix product, GFLOP/s"}.items():
            found = [spread(Spread(**record["states"][state]["machine_speed"][unit]), 0) for state in states]
            yield [speed, found[0], "", found[1], ""]

    headings = [heading for name in states.values() for heading in (f"{name}, ms per token", "ratio to HF")]
    return table(["decoder", *headings], rows())


def _machine(records: Records) -> str:
    """A line for each machine and setting of the records; a single line if all records have the same."""
    lines = {
        f"{record['model']}, {record['dtype']}, {record['forward']} forward pass and {record['linears']} linear layers "
        f"unless stated otherwise, at most {record['settings']['tokens']} new tokens. "
        f"{one_line(record['machine'])}.": None
        for name, record in records.items()
        if name in MEASUREMENTS
    }
    return "\n".join(lines) or NOT_MEASURED


def _conditions(records: Records) -> str:
    """The state of the machine during each measurement. A processor is named where it is not that of the first one."""
    measured = {name: records[name] for name in MEASUREMENTS if name in records}
    ratios = measured.pop("ratio", {"groups": {}})
    measured |= {f"ratio, {group}": {**ratios, **of} for group, of in ratios["groups"].items()}
    measured |= {f"{name}, {part}": of for name in OTHERS for part, of in records.get(name, {}).items()}
    found = [[name, *state(record)] for name, record in measured.items()]
    first = found[0][1] if found else ""
    rows = ([name, "" if processor == first else processor, *speeds] for name, processor, *speeds in found)
    headings = ["measurement", "processor", "copy, GB/s", "matrix product, GFLOP/s", "load average"]
    return table(headings, rows) if found else NOT_MEASURED


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
    processor, copied, multiplied, load = state(records["single_stream"])
    return (
        table(["time per token, one answer at a time", "ratio: median (lowest – highest)"], rows())
        + f"\n\n{records['single_stream']['model']} on {machine['torch_threads']} threads of {machine['processor']}. "
        "¹ the same model run through Hugging Face's modules, as those outside the Llama family are; "
        "² against `generate` on the padded batch."
        f"\n\nState of the machine ({processor}) before and after: a copy at {copied} GB/s, a matrix product at "
        f"{multiplied} GFLOP/s, load average {load}."
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


TABLES: dict[str, Callable[[Records], str]] = {
    "missed": _missed,
    "single_stream": lambda records: comparison(records["single_stream"]["comparison"]),
    "decoding": _decoding,
    "ratio": _ratios,
    "context": lambda records: comparison(records["context"]["comparison"]),
    "prompt_length": lambda records: _grown(records["prompt_length"]["lengths"], "prompt tokens", per_step=True),
    "memory": _memory,
    "batch": lambda records: _grown(records["batch"]["sizes"], "batch"),
    "candidates": _candidates,
    "capture": _capture,
    "source_attention": _source_attention,
    "precision": _precision,
    "scoring": _scoring,
    "startup": _startup,
    "contention": _contention,
    "machine": _machine,
    "conditions": _conditions,
    "readme": _readme,
    **serving.TABLES,
    **gguf.TABLES,
}


if __name__ == "__main__":
    print(write_report(RESULTS, in_place=True))
