"""How far a judge agrees with people: Cohen's kappa, and the paper's ratio of it to that between people."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.extras import need
from cocoa_integrations.evaluation.files import find_file, read_records

_TRUE = ("1", "true", "yes", "correct")
_FALSE = ("0", "false", "no", "wrong", "incorrect")


_NAMES = {"info": "informativeness"}

Place = tuple[str, str]  # an arm, and a sample's id
Labels = dict[str, dict[Place, bool]]


def read_labels(file: Path, places: Container[Place], figures: Sequence[str]) -> dict[str, Labels]:
    """The labels of each annotator, by what is labelled.

    Args:
        file: CSV with the columns ``arm`` (as in ``samples.jsonl``), ``id``, and one for each annotator, who says
            ``true`` or ``false`` (also 1 and 0, yes and no, correct and wrong), or leaves a field empty. A column
            ``NAME`` is about the first of the figures, which is truth, ``NAME:info`` about another.
        places: the answers of the run.
        figures: what the run's answers are judged by.

    Raises:
        DataError: the file cannot be used.
        MissingExtraError: scikit-learn is not installed, which :func:`agreement` needs.
    """
    _kappa_score()
    people: dict[str, Labels] = {}
    first: dict[Place, str] = {}
    for record in read_records(find_file(file)):
        place = record.text("arm"), record.identity("id")
        if place not in places:
            raise DataError(f"{record.where}: the run has no sample {place[1]!r} of the arm {place[0]!r}")
        if place in first:
            raise DataError(
                f"{record.where}: the answer {place[1]!r} of {place[0]!r} is labelled by {first[place]} too"
            )
        first[place] = record.where
        for name in record.values.keys() - {"arm", "id"}:
            if given := str(record.values[name] or "").strip().lower():
                if given not in (*_TRUE, *_FALSE):
                    raise DataError(f"{record.where}: the label {given!r} of {name!r} is neither true nor false")
                person, _, figure = map(str.strip, name.partition(":"))
                if (figure := figure or figures[0]) not in figures or not person:
                    raise DataError(f"{record.where}: the column {name!r}; answers are judged by {', '.join(figures)}")
                labels = people.setdefault(figure, {}).setdefault(person, {})
                if place in labels:
                    raise DataError(f"{record.where}: two columns hold what {person!r} says about {figure}")
                labels[place] = given in _TRUE
    if not people:
        raise DataError(f"{file} holds no labels: give a column for each annotator")
    return {figure: dict(sorted(people[figure].items())) for figure in figures if figure in people}


def agreement(judged: Mapping[Place, bool | None], people: Labels) -> dict[str, Any]:
    """Cohen's kappa of the judge with each annotator, and, where there are several, of these with each other.

    Args:
        judged: the judge's verdicts; those that are none are left out.
        people: of one figure, from :func:`read_labels`.

    Returns:
        ``judge`` (by annotator) and ``people`` (by pair of annotators), each with ``kappa`` and the ``pairs`` of labels
        it is of; ``mean_judge`` and ``mean_people``, the means of these kappas; ``ratio``, of the two means, as in the
        paper; ``labelled``, by annotator. A kappa that is not defined, where all labels are alike, is none.
    """
    said = {place: verdict for place, verdict in judged.items() if verdict is not None}
    judge = {name: _kappa(said, labels) for name, labels in people.items()}
    each_other = {f"{one}, {two}": _kappa(people[one], people[two]) for one, two in combinations(people, 2)}
    with_judge, between = _mean(judge), _mean(each_other)
    return {
        "judge": judge,
        "people": each_other,
        "mean_judge": with_judge,
        "mean_people": between,
        "ratio": with_judge / between if with_judge is not None and between else None,
        "labelled": {name: len(labels) for name, labels in people.items()},
    }


def in_words(agreed: Mapping[str, Any], figure: str) -> str:
    """What :func:`agreement` returns of a figure, as lines of Markdown."""
    lines = [f"- judge and {name}: {_shown(found)}" for name, found in agreed["judge"].items()]
    lines += [f"- {pair}: {_shown(found)}" for pair, found in agreed["people"].items()]
    ratio = agreed["ratio"]
    last = [] if ratio is None else ["", f"The judge's mean kappa is {ratio:.2f} of that between people."]
    return "\n".join([f"Cohen's kappa, about {_NAMES.get(figure, figure)}:", "", *lines, *last]) + "\n"


def _shown(found: Mapping[str, Any]) -> str:
    kappa = "not defined, all are alike" if found["kappa"] is None else f"{found['kappa']:.3f}"
    return f"{kappa} (labels in common: {found['pairs']})"


def _kappa(first: Mapping[Place, bool], second: Mapping[Place, bool]) -> dict[str, Any]:
    both = [place for place in first if place in second]
    pairs = [[labels[place] for place in both] for labels in (first, second)]
    kappa = float(_kappa_score()(*pairs)) if len({*pairs[0], *pairs[1]}) > 1 else math.nan
    return {"kappa": None if math.isnan(kappa) else kappa, "pairs": len(both)}


def _kappa_score() -> Callable[..., float]:
    score: Callable[..., float] = need("sklearn.metrics", extra="eval", what="Cohen's kappa").cohen_kappa_score
    return score


def _mean(kappas: Mapping[str, Mapping[str, Any]]) -> float | None:
    known = [found["kappa"] for found in kappas.values() if found["kappa"] is not None]
    return math.fsum(known) / len(known) if known else None
