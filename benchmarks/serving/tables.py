"""The tables of the performance page about the server under load, from ``serving.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.markdown import spread, state, table
from benchmarks.serving.names import OURS, OURS_SIG, RIVAL, RIVAL_BATCHES
from cocoa_engine.lab.timing import Spread, one_line

Records = Mapping[str, Any]


def _when(part: Mapping[str, Any]) -> str:
    before, after = part["load_average"]
    machine = f"{one_line(part['machine'])}. Load average before and after: {before:.1f}, {after:.1f}."
    return f"{machine}\n\n{state({name: part[name] for name in ('machine_state',) if name in part})}"


def _seconds(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} s, {found['p99']:.2f} s"


def _percent(found: Mapping[str, float]) -> str:
    return f"{found['median']:+.0%} ({found['lowest']:+.0%} – {found['highest']:+.0%})"


def load(records: Records) -> str:
    """Many streams over minutes, and throughput beside the engine alone."""
    part = records["serving"]["load"]
    long = part["long"]
    rows = [
        ["answers in", f"{long['answers']} in {long['seconds']:.0f} s"],
        ["errors; refused with 429 and repeated", f"{long['failures']}; {long['refusals']}"],
        ["answers whose text is not that of the request alone", str(long["other_texts"])],
        ["tokens per second", f"{long['tokens_per_second']:.1f}"],
        ["time to the first span: median, 99th percentile", _seconds(long["to_first"])],
        ["time between spans: median, 99th percentile", _seconds(long["between"])],
        ["cores in use: server, client", f"{long['server_cores']:.2f}, {long['client_cores']:.2f}"],
        ["time per token, above the engine's without a server", _percent(part["overhead"])],
        ["processor time per token, above the engine's without a server", _percent(part["processor_overhead"])],
    ]
    heading = f"{part['streams']} streams, {part['max_batch_size']} decoded together, {part['threads']} threads"
    return f"{table([heading, ''], iter(rows))}\n\n{_when(part)}"


def load_memory(records: Records) -> str:
    """Memory under the same load by fifths of the run, with and without the server's setting of the allocator."""
    part = records["serving"]["load_memory"]
    rows = []
    for name, long in part["allocators"].items():
        sizes = [*long["memory_mib"]["fifths"], long["memory_mib"]["highest"]]
        rows.append([name, *(f"{size:,.0f}" for size in sizes), f"{long['answers']} in {long['seconds']:.0f} s"])
    headings = ["memory of the server, MiB", *(f"fifth {number}" for number in range(1, 6)), "highest", "answers"]
    speed, spent = (spread(Spread(**part[name])) for name in ("speed", "processor_time"))
    asked = (
        f"{part['streams']} streams, {part['max_batch_size']} decoded together, `max_tokens` {part['max_tokens']}, "
        f"threads: {part['threads']}. With one arena, in turns: tokens per second {speed} times, and processor time "
        f"per token {spent} times that with glibc's own."
    )
    return f"{table(headings, iter(rows))}\n\n{asked}\n\n{_when(part)}"


def rival(records: Records) -> str:
    """Beside ``transformers serve``."""
    part = records["serving"]["rival"]
    rows = []
    for count, names in part["at_once"].items():
        base = names.get("transformers serve")
        for name, one in names.items():
            rows.append(
                [
                    count,
                    name,
                    f"{one['tokens_per_second']:.1f}",
                    "" if base is None else f"{one['tokens_per_second'] / base['tokens_per_second']:.1f}",
                    f"{one['to_first']:.2f}",
                    f"{one['tokens']:.0f}",
                    f"{one['failures']:.0f}",
                ]
            )
    headings = ["at once", "server", "tokens per second", "times", "first text after, s", "tokens", "errors"]
    not_run = "".join(f"\n\n{name} did not run." for name in part["not_run"])
    return f"{table(headings, iter(rows))}{not_run}\n\n{_when(part)}"


def rival_in_words(records: Records) -> str:
    """How many times as fast each decoder is as each of the other servers, in two sentences."""
    counts: Mapping[str, Any] = records["serving"]["rival"]["at_once"]
    names = {RIVAL: "`transformers serve` as it starts by default", RIVAL_BATCHES: "its continuous batching"}
    decoders = {OURS: "greedy decoding", OURS_SIG: "CoCoA-SIG"}
    sentences = []
    for other, described in names.items():
        compared: list[str] = []
        for ours, decoder in decoders.items():
            both = {count: names for count, names in counts.items() if ours in names and other in names}
            times = (one[ours]["tokens_per_second"] / one[other]["tokens_per_second"] for one in both.values())
            if both:
                at_once = "" if compared else f" with {' / '.join(both)} requests at once"
                compared.append(f"{decoder} is {' / '.join(f'{one:.1f}' for one in times)} times as fast{at_once}")
        if compared:
            sentences.append(f"Against {described}, {', and '.join(compared)}.")
    return " ".join(sentences)


def first_text(records: Records) -> str:
    """Why the first text comes when it comes, in a sentence."""
    part: Mapping[str, Any] = records["serving"]["first_text"]
    kinds = ("tokens", "passes")
    greedy, sig, other = (
        {kind: f"{statistics.mean(part[name][kind]):.1f}" for kind in kinds} for name in (OURS, OURS_SIG, RIVAL)
    )
    return (
        "The first text of `cocoa serve` is a decided span, and that of `transformers serve` a token: in these "
        f"requests the span has {greedy['tokens']} tokens on average with greedy decoding and {sig['tokens']} with "
        f"CoCoA-SIG, and comes {greedy['passes']} and {sig['passes']} forward passes after the prompt's own, since its "
        f"risk needs the pass over its last token; the other's {other['tokens']} token comes after {other['passes']}."
    )


def memory(records: Records) -> str:
    """Memory after every 100 answers, and what it is made of."""
    part = records["serving"]["memory"]
    curves: Mapping[str, Any] = part["curves"]
    names = ("unique_mib", "prefix_cache_mib", "handed_out_mib", "free_mib")
    rows = []
    for size, points in curves.items():
        rows += [[size, f"{one['answers']:,}", *(f"{one[name]:,.0f}" for name in names)] for one in points]
    headings = [
        "prefix cache at most",
        "answers",
        "memory of the server, MiB",
        "prefix cache, MiB",
        "in use by the allocator's callers, MiB",
        "freed, and kept by the allocator, MiB",
    ]
    asked = f"{part['streams']} streams, `max_tokens` {part['max_tokens']}, threads: {part['threads']}"
    return f"{table(headings, iter(rows))}\n\n{asked}. {one_line(part['machine'])}."


def faults(records: Records) -> str:
    """A killed server, and clients that do not read."""
    kill, readers = records["serving"]["kill"], records["serving"]["readers"]
    rows = [
        ["killed under load: streams; those whose client saw an error", f"{kill['streams']}; {kill['saw_an_error']}"],
        [
            "the new process on the same port: ready after; served",
            f"{kill['seconds_to_ready']:.1f} s; {_yes(kill['served_after'])}",
        ],
        [
            f"8 requests without and beside {readers['silent']} clients that never read",
            f"{readers['seconds_without']:.1f} s, {readers['seconds_beside']:.1f} s",
        ],
        [
            "errors among these; a slow reader got everything",
            f"{readers['failures']}; {_yes(readers['slow_reader_complete'])}",
        ],
    ]
    return f"{table(['what', 'found'], iter(rows))}\n\n{_when(readers)}"


def _yes(found: bool) -> str:
    return "yes" if found else "**no**"


TABLES: dict[str, Callable[[Records], str]] = {
    "serving_load": load,
    "serving_load_memory": load_memory,
    "serving_rival": rival,
    "serving_rival_in_words": rival_in_words,
    "serving_first_text": first_text,
    "serving_memory": memory,
    "serving_faults": faults,
}
