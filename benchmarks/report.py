"""Writes the tables of ``docs/explanation/performance.md`` and of the README from the JSON of the measurements.

    python -m benchmarks.report

Each table stands between two markers, ``<!-- measured: NAME -->`` and ``<!-- end -->``; nothing else is touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.bars import BARS, Record, check, compared
from benchmarks.measure import BASE, COCOA_SIG, GREEDY, LEAN, MODULES
from benchmarks.settings import DOCS, MEASUREMENTS, RESULTS, ROOT
from cocoa_engine.studies.machine import one_line
from cocoa_engine.studies.timing import Spread

Records = Mapping[str, Record]

PERFORMANCE = DOCS / "performance.md"
README = ROOT / "README.md"
NOT_MEASURED = "Not measured yet."
MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(folder: Path) -> dict[str, Record]:
    """The records there are."""
    paths = {name: folder / f"{name}.json" for name in MEASUREMENTS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def filled(text: str, records: Records) -> str:
    """A document with every table between markers written anew."""

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}{written(name, records)}\n{end}"

    return MARKED.sub(table, text)


def written(name: str, records: Records) -> str:
    """One table; where its measurement is missing, that it is."""
    try:
        return TABLES[name](records)
    except KeyError as missing:
        if missing.args[0] in MEASUREMENTS:
            return NOT_MEASURED
        raise


def write_report(folder: Path, *, in_place: bool) -> str:
    """Fill the documents from the JSON in a folder.

    Args:
        in_place: write the project's documents; otherwise copies of them into the folder.

    Returns:
        The table of the bars, as Markdown.
    """
    records = read(folder)
    for path in (PERFORMANCE, README):
        target = path if in_place else folder / path.name
        target.write_text(filled(path.read_text(encoding="utf-8"), records), encoding="utf-8")
    return written("bars", records)


def _table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _figure(found: Spread, digits: int = 2) -> str:
    """The median, with lowest and highest where they differ from it."""
    median, lowest, highest = (_number(value, digits) for value in found)
    return median if lowest == highest else f"{median} ({lowest} – {highest})"


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value < 10 else f"{value:,.1f}"


def _ratio(way: Record) -> str:
    return _figure(Spread(**way["ratio"]))


def _milliseconds(way: Record) -> str:
    return f"{1000 * Spread.of(way['seconds']).median:.1f}"


def _cost(way: Record, *names: str) -> list[str]:
    return [f"{way['per_kept_token'][name]:.2f}" if "per_kept_token" in way else "" for name in names]


def _bars(records: Records) -> str:
    checked = {each.bar.what: each for each in check(records)}

    def rows() -> Iterator[Sequence[str]]:
        for bar in BARS:
            limit = f"{'≥' if bar.at_least else '≤'} {bar.limit:.2f}"
            if each := checked.get(bar.what):
                yield [bar.what, limit, _figure(each.found), "yes" if each.met else "**no**"]
            else:
                yield [bar.what, limit, "not measured", ""]

    return _table(["quantity", "target", "measured: median (lowest – highest)", "met"], rows())


def _race(race: Record, heading: str = "decoder") -> str:
    def rows() -> Iterator[Sequence[str]]:
        for name, way in race["ways"].items():
            yield [name, _milliseconds(way), _ratio(way), *_cost(way, "forward_passes", "fed_tokens")]

    headings = [heading, "ms per token", f"ratio to {race['base']}", "forward passes per token", "tokens fed per token"]
    return _table(headings, rows())


def _decoding(records: Records) -> str:
    looks = records["single_stream"]["decoding"]
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
    looks = {**looks, "wasted_per_kept_token": looks["fed_per_kept_token"] - 1}
    rows: Iterator[Sequence[str]] = (
        [name, "none" if looks[key] is None else f"{looks[key]:.2f}"] for key, name in names.items()
    )
    counted = f"{looks['prompts']} prompts, {looks['tokens']} tokens"
    return _table([counted, ""], rows)


def _grown(races: Mapping[str, Record], heading: str, *, per_step: bool = False) -> str:
    """A row for each size, and in it the two ways of ours against Hugging Face's and one another, per token."""

    def rows() -> Iterator[Sequence[str]]:
        for size, race in races.items():
            ways = race["ways"]
            yield [
                f"{int(size):,}",
                *(_milliseconds(ways[name]) for name in (BASE, GREEDY, COCOA_SIG)),
                *(_ratio(ways[name]) for name in (GREEDY, COCOA_SIG)),
                _figure(compared(race, COCOA_SIG, GREEDY)),
                *(_per_step(race["cocoa_sig_to_our_greedy"]) if per_step else []),
            ]

    headings = [
        heading,
        "HF greedy, ms per token",
        "our greedy, ms",
        "CoCoA-SIG, ms",
        "our greedy / HF",
        "CoCoA-SIG / HF",
        "CoCoA-SIG / our greedy",
        *(["CoCoA-SIG, passes per token", "CoCoA-SIG / our greedy, per pass"] if per_step else []),
    ]
    return _table(headings, rows())


def _per_step(found: Record) -> list[str]:
    return [f"{found['steps_per_token'][COCOA_SIG]:.2f}", _figure(Spread(**found["per_step"]))]


def _tips(records: Records) -> str:
    lengths = records["tips"]["lengths"]

    def rows() -> Iterator[Sequence[str]]:
        for tips in next(iter(lengths.values()))["seconds"]:
            row = [tips]
            for found in lengths.values():
                milliseconds = 1000 * Spread.of(found["seconds"][tips]).median
                row += [f"{milliseconds:.1f}", _figure(Spread(**found["to_one_tip"][tips]))]
            yield row

    headings = ["tokens fed"]
    for length in lengths:
        headings += [f"ms after {int(length):,}", "ratio to one"]
    return _table(headings, rows())


def _candidates(records: Records) -> str:
    return _race(records["candidates"]["candidates"], "`max_candidates`").replace("ratio to 1 ", "ratio to greedy ")


def _memory(records: Records) -> str:
    memory = records["prompt_length"]["memory"]

    def rows() -> Iterator[Sequence[str]]:
        for kind, name in {"key_value_bytes": "keys and values", "peak_bytes": "whole process, at its peak"}.items():
            sizes = [f"{Spread.of(found[kind]).median / 2**20:,.1f}" for found in memory["methods"].values()]
            yield [name, *sizes, _figure(Spread(**memory["cocoa_sig_to_greedy"][kind]), 3)]

    return _table([f"prompt of {memory['length']:,} tokens", "our greedy, MiB", "CoCoA-SIG, MiB", "ratio"], rows())


def _capture(records: Records) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for name, found in records["capture"]["forwards"].items():
            steps = [f"{1000 * Spread.of(seconds).median:.2f}" for seconds in found["seconds"].values()]
            yield [name, *steps, _figure(Spread(**found["with_to_without"]))]

    return _table(["forward pass", "with, ms", "without, ms", "with / without"], rows())


def _scoring(records: Records) -> str:
    record = records["scoring"]
    rows = iter([[name, f"{1000 * Spread.of(values).median:.1f}"] for name, values in record["seconds"].items()])
    return (
        _table([f"{record['answers']} answers to a prompt of {record['prompt_tokens']} tokens", "ms per answer"], rows)
        + f"\n\nTimes faster: {_figure(Spread(**record['times_faster']))}. Times the prompt was read: "
        f"{record['prompt_reads']}."
    )


def _startup(records: Records) -> str:
    steps = records["startup"]["steps"]
    rows: Iterator[Sequence[str]] = (
        [name, _figure(Spread(step["median"], step["lowest"], step["highest"]))] for name, step in steps.items()
    )
    return _table(["step", "seconds"], rows)


def _machine(records: Records) -> str:
    """Everything that the records were measured on: one line if it was one machine and setting, as it should be."""
    lines = {
        f"{record['model']}, {record['dtype']}, {record['forward']} forward pass and {record['linears']} linear layers "
        f"unless stated otherwise, at most {record['settings']['tokens']} new tokens. "
        f"{one_line(record['machine'])}.": None
        for record in records.values()
    }
    return "\n".join(lines) or NOT_MEASURED


def _readme(records: Records) -> str:
    race = records["single_stream"]["rivals"]
    names = {
        BASE: "Hugging Face `generate`, greedy",
        f"{GREEDY}, {LEAN}": "our greedy",
        f"{COCOA_SIG}, {LEAN}": "CoCoA-SIG",
        f"{GREEDY}, {MODULES}": "our greedy, other architectures¹",
        f"{COCOA_SIG}, {MODULES}": "CoCoA-SIG, other architectures¹",
    }

    def rows() -> Iterator[Sequence[str]]:
        for way, name in names.items():
            yield [name, _ratio(race["ways"][way])]
        for size in ("4", "8"):
            if size in records["batch"]["sizes"]:
                yield [f"CoCoA-SIG, batch of {size}²", _ratio(records["batch"]["sizes"][size]["ways"][COCOA_SIG])]

    machine = records["single_stream"]["machine"]
    return (
        _table(["time per token, one answer at a time", "ratio: median (lowest – highest)"], rows())
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
    return _race(measured["race"], "weights") + "\n\n" + _table(["change from float32", *change], rows)


TABLES: dict[str, Callable[[Records], str]] = {
    "bars": _bars,
    "single_stream": lambda records: _race(records["single_stream"]["rivals"]),
    "further_rivals": lambda records: _race(records["single_stream"]["further"]),
    "decoding": _decoding,
    "context": lambda records: _race(records["context"]["rivals"]),
    "prompt_length": lambda records: _grown(records["prompt_length"]["lengths"], "prompt tokens", per_step=True),
    "tips": _tips,
    "memory": _memory,
    "batch": lambda records: _grown(records["batch"]["sizes"], "batch"),
    "candidates": _candidates,
    "capture": _capture,
    "precision": _precision,
    "scoring": _scoring,
    "startup": _startup,
    "machine": _machine,
    "readme": _readme,
}


if __name__ == "__main__":
    print(write_report(RESULTS, in_place=True))
