"""The tables of the performance page about the server under load, from ``serving.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.markdown import spread, table
from benchmarks.serving.names import OURS, OURS_SIG, RIVAL, RIVAL_BATCHES
from cocoa_engine.lab.timing import Spread

Records = Mapping[str, Any]

PARTS = ("load", "load_memory", "rival")


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
        ["time per token, above the engine's without a server", _percent(part["overhead"])],
        ["processor time per token, above the engine's without a server", _percent(part["processor_overhead"])],
    ]
    heading = f"{part['streams']} streams, {part['max_batch_size']} decoded together, {part['threads']} threads"
    return table([heading, ""], iter(rows))


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
    return f"{table(headings, iter(rows))}\n\n{asked}"


def rival(records: Records) -> str:
    """Beside ``transformers serve``."""
    part = records["serving"]["rival"]
    names = [name for name in (OURS, OURS_SIG, RIVAL, RIVAL_BATCHES) if name not in part["not_run"]]

    def cell(servers: Mapping[str, Any], name: str) -> str:
        speed = servers[name]["tokens_per_second"]
        times = f" ({speed / servers[RIVAL]['tokens_per_second']:.1f} ×)" if RIVAL in servers else ""
        return f"{speed:.1f}{times}, {servers[name]['to_first']:.2f} s"

    rows = ([count, *(cell(servers, name) for name in names)] for count, servers in part["at_once"].items())
    failures = sum(server["failures"] for servers in part["at_once"].values() for server in servers.values())
    not_run = "".join(f" {name} did not run." for name in part["not_run"])
    return f"{table(['at once', *names], rows)}\n\nFailed requests: {failures:.0f}.{not_run}"


TABLES: dict[str, Callable[[Records], str]] = {
    "serving_load": load,
    "serving_load_memory": load_memory,
    "serving_rival": rival,
}
