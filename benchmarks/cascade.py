"""What it saves to ask a small model first, and a large one only where the risk of the small one's answer is high.

    python -m benchmarks.cascade ask --rag rag.jsonl --small small.gguf --large large.gguf
    python -m benchmarks.cascade plot

``ask`` answers questions of ``benchmarks.rag_questions`` with both models, one by one and in turn, adds the risk and
the time of each answer to a CSV file, and continues where it stopped. ``plot`` draws the figure of
``docs/how-to/cascade.md`` and prints its tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.own_answers import rag, read, write
from benchmarks.rag_questions import KINDS
from benchmarks.settings import ROOT
from cocoa_engine import CocoaEngine, Runtime
from cocoa_engine.lab.statistics import Floats, interval

ANSWERS = ROOT / "benchmarks" / "results" / "cascade.csv"
FIGURE = ROOT / "docs" / "how-to" / "cascade.svg"
MODELS = ("small", "large")
COLOURS = ("#1f77b4", "#d62728")
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
DEFAULT = 0.9
"""That of a rank among right answers."""
DRAWS = 2000


def ask(options: argparse.Namespace) -> None:
    """Append what is missing of the answers to the file. Each answer pays for its whole prompt: no prefix is kept."""
    torch.set_num_threads(options.threads)
    runtime = Runtime(prefix_cache_mb=0)
    engines = {model: CocoaEngine.from_pretrained(getattr(options, model), runtime=runtime) for model in MODELS}
    done = {(row["model"], row["id"]) for row in read(options.answers)}
    questions = list(rag(options.rag, options.limit))
    for engine in engines.values():  # the first call measures which backend is fastest
        engine.chat(questions[0].messages, max_new_tokens=64)
    for asked, (model, engine) in product(questions, engines.items()):
        if (model, asked.id) in done:
            continue
        start, worked = perf_counter(), process_time()
        answer = engine.chat(asked.messages, max_new_tokens=64)
        row = {
            "model": model,
            "id": asked.id,
            "kind": asked.id.partition("-")[2],
            "wrong": int(not asked.is_right(answer.text)),
            "answer_risk": f"{answer.answer_risk:.4f}",
            "seconds": f"{perf_counter() - start:.2f}",
            "cpu_seconds": f"{process_time() - worked:.2f}",
            "tokens": len(answer.token_ids),
        }
        write(options.answers, [row])


class Cascade(NamedTuple):
    """Cascades at t thresholds, under B weightings of the questions; each field is ``[B, t]``.

    Attributes:
        passed_on: the share of the questions that the large model answers, too.
        cost: the mean time of a question, where the large model alone takes 1.
        right: the share of right answers.
        random: that share if as many questions, drawn at random, are passed on.
        routed: that share if one model, drawn at random before it is asked, answers, and takes as long; at most that of
            the large model.
    """

    passed_on: Floats
    cost: Floats
    right: Floats
    random: Floats
    routed: Floats


class Pairs(NamedTuple):
    """The answers of the small (0) and the large model (1) to n questions, ``[2, n]``."""

    kinds: NDArray[np.str_]  # [n]
    passages: NDArray[np.str_]  # [n]
    right: NDArray[np.bool_]
    risks: Floats
    seconds: Floats

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> Pairs:
        """The questions that both have answered."""
        small, large = ({row["id"]: row for row in rows if row["model"] == model} for model in MODELS)
        pairs = [(row, large[name]) for name, row in small.items() if name in large]
        risks, seconds, wrong = (
            np.array([[float(row[column]) for row in pair] for pair in pairs]).T
            for column in ("answer_risk", "cpu_seconds", "wrong")
        )
        passages, kinds = np.array([row["id"].split("-") for row, _ in pairs]).T
        return cls(kinds, passages, wrong == 0, risks, seconds)

    def of_kind(self, kind: str) -> Pairs:
        """The questions of a kind."""
        own = self.kinds == kind
        right, risks, seconds = self.right[:, own], self.risks[:, own], self.seconds[:, own]
        return Pairs(self.kinds[own], self.passages[own], right, risks, seconds)

    def draws(self) -> Floats:
        """How often each question is in each bootstrap sample of whole passages, ``[DRAWS, n]``."""
        _, number = np.unique(self.passages, return_inverse=True)
        count = number.max() + 1
        counts = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)
        return counts[:, number].astype(np.float64)

    def cascade(self, passed: NDArray[np.bool_], weights: Floats | None = None) -> Cascade:
        """What it costs and gives to pass on the questions in ``passed``, ``[t, n]``; ``weights``: ``[B, n]``."""
        weights = np.ones((1, passed.shape[1])) if weights is None else weights
        weights = weights / weights.sum(axis=1, keepdims=True)
        small, large = weights @ self.right[:1].T, weights @ self.right[1:].T
        time = weights @ self.seconds[1:].T
        least = weights @ self.seconds[:1].T / time
        share, cost = weights @ passed.T, weights @ (self.seconds[0] + passed * self.seconds[1]).T / time
        right = weights @ np.where(passed, self.right[1], self.right[0]).T
        asked = np.minimum((cost - least) / (1 - least), 1)  # the share of the large model
        return Cascade(share, cost, right, small + share * (large - small), small + asked * (large - small))

    def risky(self, thresholds: Sequence[float] | Floats, model: int = 0) -> NDArray[np.bool_]:
        """The answers whose risk reaches each threshold, ``[t, n]``, as gates compare them."""
        below: NDArray[np.bool_] = self.risks[model] < np.asarray(thresholds)[:, None]
        return ~below

    def answered(self, thresholds: Sequence[float] | Floats, model: int) -> tuple[Floats, Floats]:
        """The share of questions whose answer stays below each threshold, and of these the right share, ``[t]``.

        Of no answers the share is NaN.
        """
        passed = ~self.risky(thresholds, model)
        count, right = passed.sum(axis=1), (passed & self.right[model]).sum(axis=1)
        return count / passed.shape[1], np.divide(right, count, out=np.full(len(count), np.nan), where=count > 0)

    def every_threshold(self, model: int = 0) -> Floats:
        """The thresholds that make a difference: from 0, which every answer reaches, to one that none does."""
        return np.unique([0.0, *self.risks[model], 1.1])


def tables(pairs: Pairs) -> Iterator[str]:
    """What cascades and gates give at some thresholds, in Markdown."""
    columns = "passed on | time | right | more than a random cascade | more than a random model"
    yield f"| threshold | {columns} |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    time = pairs.cascade(pairs.risky([1.1])).cost.item()
    small, large = map(_percent, pairs.right.mean(axis=1))
    yield f"| small model alone | | {time:.2f} | {small} | | |"
    for threshold in THRESHOLDS[::-1]:
        yield f"| {threshold} | {' | '.join(_compared(pairs, threshold))} |"
    yield f"| large model alone | | 1.00 | {large} | | |"
    yield ""
    yield f"| kind | small model alone | large model alone | {columns} |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind in KINDS:
        own = pairs.of_kind(kind)
        cells = [kind.replace("_", " "), *map(_percent, own.right.mean(axis=1)), *_compared(own, DEFAULT)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| threshold | small model: answered | right of these | large model: answered | right of these |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for threshold in (*THRESHOLDS, 1.1):
        cells = [_percent(value.item()) for model in (0, 1) for value in pairs.answered([threshold], model)]
        yield f"| {'none' if threshold > 1 else threshold} | {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _compared(pairs: Pairs, threshold: float) -> list[str]:
    """The cells of a cascade: what is passed on, time, what is right, and how many points that is above chance."""
    passed = pairs.risky([threshold])
    result, drawn = pairs.cascade(passed), pairs.cascade(passed, pairs.draws())
    gains = [
        interval(100 * (result.right - result_by).item(), 100 * (drawn.right - drawn_by)[:, 0])
        for result_by, drawn_by in ((result.random, drawn.random), (result.routed, drawn.routed))
    ]
    share, right = (_percent(value.item()) for value in (result.passed_on, result.right))
    points = [gain.shown("+.0f").replace("-0", "+0").replace("-", "−") for gain in gains]
    return [share, f"{result.cost.item():.2f}", right, *points]


def figure(pairs: Pairs) -> Figure:
    """The share of right answers over the time of a question, and over the share of questions that are answered."""
    drawing = Figure(figsize=(9, 3.8), layout="constrained")
    cascades, gates = drawing.subplots(1, 2, sharey=True)
    passed = pairs.risky(pairs.every_threshold())
    result, drawn = pairs.cascade(passed), pairs.cascade(passed, pairs.draws())
    cost, random = result.cost[0], result.random[0]
    band = random + np.quantile(drawn.right - drawn.random, [0.025, 0.975], axis=0)
    cascades.fill_between(cost, *band, color="#9467bd", alpha=0.2, lw=0)
    cascades.plot(cost, result.right[0], color="#9467bd", label="passed on by answer_risk")
    cascades.plot(cost, random, color="#7f7f7f", ls="--", label="passed on at random")
    cascades.plot([cost[-1], 1], pairs.right.mean(axis=1), color="#2ca02c", ls="-.", label="one model, at random")
    saved = pairs.cascade((pairs.right[1] & ~pairs.right[0])[None])
    ideal = (cost[-1], saved.cost.item()), (result.right[0, -1], saved.right.item())
    cascades.plot(*ideal, color="#7f7f7f", ls=":", label="passed on where only the large is right")
    chosen = pairs.cascade(pairs.risky(THRESHOLDS))
    cascades.plot(chosen.cost[0], chosen.right[0], "o", color="#9467bd", ms=4)
    for threshold, x, y in zip(THRESHOLDS, chosen.cost[0], chosen.right[0], strict=True):
        cascades.annotate(f"{threshold}", (x, y), (4, -11), textcoords="offset points", fontsize=8)
    for model, colour, x in zip(MODELS, COLOURS, (cost[-1], 1.0), strict=True):
        number = MODELS.index(model)
        cascades.plot(x, pairs.right[number].mean(), "D", color=colour, label=f"{model} model alone")
        gates.plot(*pairs.answered(pairs.every_threshold(number), number), color=colour, label=f"{model} model")
        gates.axhline(pairs.right[number].mean(), color=colour, lw=0.8, ls="--")
    cascades.set(xlabel="time per question, large model alone = 1", ylabel="share of right answers", ylim=(0, 1))
    gates.set(xlabel="share of questions answered, riskier answers withheld", xlim=(0, 1.02))
    for axes in (cascades, gates):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return drawing


def plot(options: argparse.Namespace) -> None:
    """Draw the figure, and print the tables."""
    matplotlib.use("Agg")
    # text stays text, and equal data gives equal bytes
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cocoa", "font.size": 10})
    rows = read(options.answers)
    pairs = Pairs.of(rows)
    figure(pairs).savefig(options.out, metadata={"Date": None})
    print("\n".join(tables(pairs)))
    for column in ("cpu_seconds", "seconds"):
        small, large = (np.median([float(row[column]) for row in rows if row["model"] == model]) for model in MODELS)
        print(f"\nmedian {column}, small / large: {small / large:.2f}")


def main() -> None:
    """Ask both models, or draw the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cascade", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask", help="add answers of both models")
    asking.add_argument("--rag", type=Path, required=True, help="file of benchmarks.rag_questions")
    for model in MODELS:
        asking.add_argument(f"--{model}", required=True, help="Hub name, folder or file of the model")
    asking.add_argument("--limit", type=int, default=150, help="the first of the questions (default: %(default)s)")
    asking.add_argument("--threads", type=int, default=1)
    drawing = commands.add_parser("plot", help="draw the figure and print the tables")
    drawing.add_argument("--out", type=Path, default=FIGURE, help="SVG file (default: that of the page)")
    for command, run in ((asking, ask), (drawing, plot)):
        command.add_argument("--answers", type=Path, default=ANSWERS, help="default: %(default)s")
        command.set_defaults(run=run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
