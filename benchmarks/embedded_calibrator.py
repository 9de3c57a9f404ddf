"""Fit the embedded calibrator, and measure how risks carry over between data sets.

    python -m benchmarks.embedded_calibrator measure --cache CACHE --xsum xsum_token --diasumfact annotations.json ...
    python -m benchmarks.embedded_calibrator fit --cache CACHE --out cocoa_engine/risk/embedded.json
    python -m benchmarks.embedded_calibrator compare --cache CACHE --out docs/explanation/signal/data
    python -m benchmarks.embedded_calibrator parts --cache CACHE --xsum xsum_token
    python -m benchmarks.embedded_calibrator answers --cache CACHE

``measure`` writes the features of a few prompts at a time to the cache, and continues where it was stopped. ``fit``
uses the data sets whose licence (MIT) allows it, and short_questions.jsonl, which was written for it. ``compare`` fits
on each set, and tests on the others. ``parts`` prints how well source attention ranks the spans of parts of XSum, and
``answers`` what the length of the prompt is worth for own answers.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, RiskCalibrator
from cocoa_engine.lab.data import LabelledText, Question, read_labelled, read_questions, sample
from cocoa_engine.lab.fit import FitSettings, LabelledFeatures, fit, fit_only, left_out
from cocoa_engine.lab.measured import (
    answer_values,
    force,
    labelled_answers,
    labelled_features,
    probe_layers,
    request_prompt,
)
from cocoa_engine.lab.statistics import Bootstrap, Ranked, choose, expected_calibration_error, reliability
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.prompts import Prompt
from cocoa_engine.risk.calibrator import Settings
from cocoa_engine.risk.features import PROBE_FEATURE, SPAN_FEATURES, span_features
from cocoa_engine.risk.fitted import FittedRisk

GIVEN = {
    "xsum": "xsum_token (Zhou et al., 2021; MIT)",
    "diasumfact": "DiaSumFact (Zhu et al., 2023; MIT)",
    "faithbench": "FaithBench, batches 1 to 8",
    "mushroom": "mu-SHROOM, English",
}
OWN = {"nq_swap": "NQ-Swap (MIT)", "nq": "NQ with passages"}
SHORT_QUESTIONS = Path(__file__).with_name("short_questions.jsonl")
STYLES = {
    "short_sentence": "short questions, answered in one short sentence",
    "short_words": "short questions, answered in a few words",
    "short_plain": "short questions, without an instruction",
}
"""Short questions without a passage are asked with a system message, with the request of a calibrator, and alone."""
PROMPTS = {"nq": 320, "nq_swap": 450}
"""The number of prompts of the largest sets; of the others, all are used."""

CHUNKS = {"xsum": 10, "diasumfact": 10, "faithbench": 4, "mushroom": 50, "nq": 16, "nq_swap": 8} | dict.fromkeys(
    STYLES, 64
)
TOKENS = {"short_plain": 48}
"""The maximum length of an answer, where it is not 32 tokens."""

FIRST = 30
"""The first prompts of XSum and DiaSumFact are those that ``cocoa signal --prompts 30`` draws."""

LONGEST_PROMPT, LONGEST_ANSWER = 1500, 200
"""Longer prompts and answers are left out, in tokens."""

EMBEDDED_SPANS = ("xsum", "diasumfact")
REPEATS = 5
"""How often own answers are divided into folds."""

RISKS = ("span", "answer", "closed_book")
"""The risks of the embedded calibrator."""

PASSED = 0.8
"""The share of right answers that the embedded thresholds let pass, on the data that they are chosen on."""


def measure(engine: CocoaEngine, paths: dict[str, Path], cache: Path) -> None:
    """Write the features of all sets, one file for each chunk of prompts."""
    for name, path in paths.items():
        records: Sequence[Any] = read_labelled(path) if name in GIVEN else read_questions(path)
        prompts = _shuffled(records, FIRST if name in ("xsum", "diasumfact") else 0)[: PROMPTS.get(name)]
        size = CHUNKS[name]
        for start in range(0, len(prompts), size):
            chunk = [record for same in prompts[start : start + size] for record in same]
            file = cache / f"{name}-{start:04d}"
            if name not in GIVEN and not file.with_suffix(".parts.npz").exists():
                config = engine.config.replace(max_new_tokens=TOKENS.get(name, 32))
                generations = engine.generate_batch(_prompts(engine, name, chunk), config=config)
                save_own(file, list(zip(chunk, generations, strict=True)))
            elif name in GIVEN and not file.with_suffix(".span.npz").exists():
                layers = probe_layers(engine.num_layers)[:1]  # of spans
                answers = force(engine, list(_short(engine, chunk)), engine.config, layers=layers)
                for level, items in labelled_features(answers, engine.config, engine.num_layers).items():
                    _save(file, level, items)


def _shuffled(records: Sequence[Any], first: int) -> list[list[Any]]:
    """The records of each prompt, in a random order of prompts."""
    by: dict[str, list[Any]] = {}
    for record in records:
        by.setdefault(record.group, []).append(record)
    begin = list(dict.fromkeys(record.group for record in sample(records, first, 0))) if first else []
    rest = [name for name in by if name not in begin]
    Random(1).shuffle(rest)
    return [by[name] for name in (*begin, *rest)]


def _short(engine: CocoaEngine, records: Sequence[LabelledText]) -> Iterator[LabelledText]:
    for record in records:
        if len(engine.encode(record.prompt)) <= LONGEST_PROMPT and len(engine.encode(record.text)) <= LONGEST_ANSWER:
            yield record


def _prompts(engine: CocoaEngine, name: str, questions: Sequence[Question]) -> list[Prompt]:
    """The prompts of a set's questions."""
    if name not in STYLES or name == "short_words":
        return [request_prompt(engine, question.request) for question in questions]
    system = [{"role": "system", "content": "Answer in one short sentence."}] if name == "short_sentence" else []
    return [engine.encode_chat([*system, {"role": "user", "content": question.text}]) for question in questions]


def save_own(file: Path, answers: Sequence[tuple[Question, Generation]]) -> None:
    """Write the features of the model's own answers and of their visible spans. Empty answers are left out."""
    answers = [(question, answer) for question, answer in answers if answer.spans]
    _save(file, "answer", labelled_answers((question, answer_values(one)) for question, one in answers))
    spans = [(n, span) for n, (_, answer) in enumerate(answers) for span in answer.spans if span.text.strip()]
    features = [span_features(span)[: SPAN_FEATURES.index(PROBE_FEATURE)] for _, span in spans]
    np.savez_compressed(file.with_suffix(".parts.npz"), features=features, answers=[n for n, _ in spans])


def highest_risks(cache: Path, name: str, risk: FittedRisk) -> tuple[list[float], list[bool], list[str]]:
    """Of each own answer of a set: the highest risk of its spans, whether it is wrong, and its prompt."""
    risks: list[float] = []
    labels: list[bool] = []
    groups: list[str] = []
    for file in sorted(cache.glob(f"{name}-*.parts.npz")):
        parts, answers = np.load(file), np.load(str(file).replace(".parts.", ".answer."))
        highest = np.zeros(len(answers["labels"]))
        np.maximum.at(highest, parts["answers"], [risk(features) for features in parts["features"].tolist()])
        risks += highest.tolist()
        labels += answers["labels"].tolist()
        groups += answers["groups"].tolist()
    return risks, labels, groups


def _save(file: Path, level: str, items: LabelledFeatures) -> None:
    states = {} if items.states is None else {"states": items.states.astype(np.float16)}
    np.savez_compressed(
        file.with_suffix(f".{level}.npz"),
        names=list(items.names),
        features=items.features,
        labels=items.labels,
        groups=items.groups,
        **states,  # type: ignore[arg-type]
    )


def load(cache: Path, name: str, level: str, *, states: bool = False) -> LabelledFeatures:
    """The measured items of a set.

    Raises:
        SystemExit: it was not measured.
    """
    chunks = [np.load(file) for file in sorted(cache.glob(f"{name}-*.{level}.npz"))]
    if not chunks:
        raise SystemExit(f"{cache} has no {level}s of {name}: run measure first.")
    return LabelledFeatures(
        chunks[0]["names"].tolist(),
        np.concatenate([chunk["features"] for chunk in chunks]),
        np.concatenate([chunk["labels"] for chunk in chunks]),
        [group for chunk in chunks for group in chunk["groups"].tolist()],
        np.concatenate([chunk["states"] for chunk in chunks]).astype(np.float32) if states else None,
    )


def fit_embedded(engine: CocoaEngine, cache: Path, out: Path, draws: int, *, keep: Sequence[str] = ()) -> None:
    """Fit and save the embedded calibrator.

    Args:
        engine: an engine with the embedded model and the default settings.
        cache: the folder of the measured features.
        out: the file to write.
        draws: bootstrap draws over prompts.
        keep: the risks (:data:`RISKS`) that are kept as they are in the file that is replaced.
    """
    kept = RiskCalibrator.load(out) if keep else None
    span, answer, closed_book = (getattr(kept, name) if name in keep else None for name in RISKS)
    if span is None:
        spans = {GIVEN[name]: load(cache, name, "span") for name in EMBEDDED_SPANS}
        pooled = LabelledFeatures.pooled(list(spans.values()))
        span, _ = fit(pooled, f"given answers: {_about(spans)}", FitSettings(draws=draws))
        highest = zip(*(highest_risks(cache, name, span) for name in ("nq_swap", *STYLES)), strict=True)
        risks, labels, groups = (list(chain.from_iterable(of_sets)) for of_sets in highest)
        span = span.model_copy(update={"threshold": choose("specificity", PASSED, risks, labels, groups)})
    of_answers = FitSettings(draws=draws, threshold=("specificity", PASSED))
    if answer is None:
        own = load(cache, "nq_swap", "answer")
        about = f"the model's own answers to questions about a passage ({_about({OWN['nq_swap']: own})})"
        answer, _ = fit(own, about, of_answers)
    if closed_book is None:
        short = _joined([load(cache, name, "answer") for name in STYLES])
        about = f"the model's own answers to short questions ({len(set(short.groups))} questions, asked in three ways)"
        closed_book, _ = fit(short, about, of_answers)
    RiskCalibrator(
        model_name=engine.model_name,
        settings=Settings.of(engine.config, engine.num_layers),
        heads=source_heads(None, engine.session.model),
        span=span,
        answer=answer,
        closed_book=closed_book,
    ).save(out)


def _joined(sets: Sequence[LabelledFeatures]) -> LabelledFeatures:
    """The items of several sets of answers to the same questions, which folds never divide."""
    groups = [group for one in sets for group in one.groups]
    return replace(LabelledFeatures.pooled(sets), groups=groups, sets=None)


def _about(sets: dict[str, LabelledFeatures]) -> str:
    return "; ".join(f"{name}, {len(set(items.groups))} prompts" for name, items in sets.items())


FEATURES = ("base", "base and source attention", "base, source attention and probe")


def _columns(items: LabelledFeatures, features: str) -> LabelledFeatures:
    """The items with some of their features; "base" leaves out source attention and probe."""
    names = [name for name in items.names if features != "base" or "source_attention" not in name]
    states = items.states if "probe" in features else None
    return LabelledFeatures(names, items.of(names), items.labels, items.groups, states)


def compare(cache: Path, out: Path, draws: int) -> None:
    """Cross-validate within each set of labelled spans, and test fits on the other sets."""
    sets = {name: load(cache, name, "span", states=True) for name in GIVEN if list(cache.glob(f"{name}-*.span.npz"))}
    rows: list[list[object]] = []
    for name, items in sets.items():
        bootstrap = Bootstrap(items.groups, draws, 0)
        columns = items.columns
        scores = {
            "-source attention": -columns["source_attention"],
            "-mean log p": -columns["mean_log_prob"],
            "-min log p": -columns["min_log_prob"],
            "mean entropy": columns["mean_entropy"],
            "-mean margin": -columns["mean_margin"],
            "fMLDS": columns["f_mlds"],
        }
        for score, values in scores.items():
            rows.append(["no fit", "", score, name, *_auroc(bootstrap, values, items), ""])
        for features in FEATURES:
            risks, folds = left_out(_columns(items, features), isotonic=False)
            found = _auroc(bootstrap, risks, items, folds)
            rows.append([name, found[0], features, name, *found, _ece(risks, items)])
    for fitted_on in (
        *[(name,) for name in sets],
        EMBEDDED_SPANS,
        ("diasumfact", "faithbench"),
        ("xsum", "faithbench"),
    ):
        if not set(fitted_on) <= set(sets) or fitted_on == ("mushroom",):
            continue
        fitted_prompts = sum(len(set(sets[name].groups)) for name in fitted_on)
        for features in FEATURES:
            model = fit_only(LabelledFeatures.pooled([_columns(sets[name], features) for name in fitted_on]))
            for name, items in sets.items():
                if name not in fitted_on:
                    risks = model(_columns(items, features))
                    found = _auroc(Bootstrap(items.groups, draws, 0), risks, items)
                    rows.append([" and ".join(fitted_on), fitted_prompts, features, name, *found, _ece(risks, items)])
    with (out / "source-attention-and-probe.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        header = [
            "fitted_on",
            "fitted_prompts",
            "features",
            "tested_on",
            "prompts",
            "spans",
            "auroc",
            "low",
            "high",
            "ece",
        ]
        writer.writerow(header)
        writer.writerows(rows)


def parts(cache: Path, path: Path) -> None:
    """Print the AUROC of -source attention on parts of XSum: by sample, by length of the article, by system."""
    items = load(cache, "xsum", "span")
    records = read_labelled(path)
    order = {name: number for number, name in enumerate(dict.fromkeys(items.groups))}
    article = np.array([order[name] for name in items.groups])
    words = {record.group: len(record.prompt.split()) for record in records}
    length = np.array([words[name] for name in items.groups])
    of_articles = [words[name] for name in order]
    ends = np.quantile(of_articles, [0.25, 0.5, 0.75])
    quarter = np.searchsorted(ends, length)
    system = _systems(items, records)
    found = {f"first {count} articles": article < count for count in (96, 291) if count < len(order)}
    found |= {
        f"articles {start + 1} to {start + 100}": article // 100 == start // 100 for start in range(0, len(order), 100)
    }
    found |= {
        f"quarter {number + 1} by length, up to {end:.0f} words": quarter == number
        for number, end in enumerate([*ends, max(of_articles)])
    }
    found |= {str(name): system == name for name in dict.fromkeys(system.tolist())}
    for name, chosen in found.items():
        part = items.only(chosen)
        values = -part.columns["source_attention"]
        prompts, spans, *ends_of = _auroc(Bootstrap(part.groups, 1000, 0), values, part)
        print(f"{name}: {prompts} articles, {spans} spans, {ends_of[0]} ({ends_of[1]} - {ends_of[2]})")


def answers(cache: Path, draws: int) -> None:
    """Print what the length of the prompt is worth for own answers to NQ-Swap, in folds by question.

    Each line has the AUROC, the AUROC within fifths of the answers by the length of their prompts, and the ECE.
    """
    items = load(cache, "nq_swap", "answer")
    lengths = items.columns["log_prompt_tokens"]
    fifth = np.searchsorted(np.quantile(lengths, [0.2, 0.4, 0.6, 0.8]), lengths)
    sets = {
        "all features": items.names,
        "without the length of the prompt": [name for name in items.names if name != "log_prompt_tokens"],
        "the length of the prompt alone": ["log_prompt_tokens"],
    }
    repeated = items.only(np.tile(np.arange(len(items.labels)), REPEATS))
    bootstrap = Bootstrap(repeated.groups, draws, 0)
    for name, names in sets.items():
        chosen = LabelledFeatures(names, items.of(names), items.labels, items.groups)
        divisions = [left_out(chosen, isotonic=False, seed=seed) for seed in range(REPEATS)]
        risks = np.concatenate([risks for risks, _ in divisions])
        folds = np.concatenate([5 * number + folds for number, (_, folds) in enumerate(divisions)])
        _, _, *found = _auroc(bootstrap, risks, repeated, folds)
        _, _, *within = _auroc(bootstrap, risks, repeated, 5 * folds + np.tile(fifth, REPEATS))
        print(
            f"{name}: {found[0]} ({found[1]} - {found[2]}), within fifths by length {within[0]} "
            f"({within[1]} - {within[2]}), ECE {_ece(risks, repeated)}"
        )
    for number in range(5):
        part, longest = items.only(fifth == number), np.expm1(lengths[fifth == number].max())
        print(f"up to {longest:.0f} tokens: {part.labels.mean():.0%} of {len(part.labels)} are wrong")


def _systems(items: LabelledFeatures, records: Sequence[LabelledText]) -> NDArray[np.str_]:
    """The system that wrote each span of XSum. The answers to an article are in the order of the records."""
    of_article: dict[str, list[str]] = {}
    for record in records:
        of_article.setdefault(record.group, []).append(record.id.split("/")[0])
    position, systems, answer, before = items.columns["log_position"], [], 0, ""
    for number, group in enumerate(items.groups):
        if group != before:
            answer = 0
        elif position[number] < position[number - 1]:  # the next answer to the same article
            answer += 1
        systems.append(of_article[group][answer])
        before = group
    return np.array(systems)


def _auroc(bootstrap: Bootstrap, values: Any, items: LabelledFeatures, folds: Any = None) -> list[object]:
    labels = items.labels.astype(np.float64)
    strata = np.zeros(len(labels), dtype=np.intp) if folds is None else folds
    found = bootstrap.interval(Ranked(values, labels, 1 - labels, strata), "auroc")
    ends = [f"{value:.3f}" for value in (found.estimate, found.low or 0.0, found.high or 0.0)]
    return [len(set(items.groups)), len(labels), *ends]


def _ece(risks: Any, items: LabelledFeatures) -> str:
    return f"{expected_calibration_error(reliability(risks, items.labels)):.3f}"


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedded_calibrator", description=__doc__)
    parser.add_argument("command", choices=["measure", "fit", "compare", "parts", "answers"])
    parser.add_argument("--cache", type=Path, required=True, help="folder of the measured features")
    parser.add_argument("--out", type=Path, help="fit: the calibrator's file; compare: the folder of the table")
    parser.add_argument(
        "--keep", choices=RISKS, nargs="+", default=(), help="fit: keep these risks of the file at --out as they are"
    )
    parser.add_argument("--draws", type=int, default=1000, help="bootstrap draws over prompts")
    for name in (*GIVEN, *OWN):
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help=f"{(GIVEN | OWN)[name]}: its file or folder")
    given = parser.parse_args()
    if given.command == "parts" and given.xsum is None:
        parser.error("parts reads the articles and systems of XSum: give the folder of its labels with --xsum.")
    if given.command in ("fit", "compare") and given.out is None:
        parser.error(f"{given.command} needs --out.")
    given.cache.mkdir(parents=True, exist_ok=True)
    if given.command == "compare":
        compare(given.cache, given.out, given.draws)
        return
    if given.command == "parts":
        parts(given.cache, given.xsum)
        return
    if given.command == "answers":
        answers(given.cache, given.draws)
        return
    engine = CocoaEngine.from_pretrained(dtype="float32", config=CocoaConfig())
    if given.command == "fit":
        fit_embedded(engine, given.cache, given.out, given.draws, keep=given.keep)
    else:
        paths = {name: getattr(given, name) for name in (*GIVEN, *OWN)} | dict.fromkeys(STYLES, SHORT_QUESTIONS)
        measure(engine, {name: path for name, path in paths.items() if path is not None}, given.cache)


if __name__ == "__main__":
    main()
