"""Agreement of a judge with human annotators: Cohen's kappa, and its ratio to the agreement between annotators."""

import math
from collections.abc import Container, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.integration import need
from cocoa_engine.lab.files import RowModel, parsed
from cocoa_integrations.evaluation.files import find_file, read_records
from cocoa_integrations.evaluation.tasks import Id, Text

_TRUE = ("1", "true", "yes", "correct")
_FALSE = ("0", "false", "no", "wrong", "incorrect")


AnswerKey = tuple[str, str]  # an arm and the id of a sample
Labels = dict[str, dict[AnswerKey, bool]]


class _Labels(RowModel, extra="allow"):
    arm: Text
    id: Id


def read_labels(file: Path, answers: Container[AnswerKey], criteria: Sequence[str]) -> dict[str, Labels]:
    """Read the labels of human annotators, by criterion, then by annotator.

    Args:
        file: a CSV file with the columns ``arm`` (as in ``samples.jsonl``) and ``id``, and a column for each annotator
            with ``true`` or ``false`` (also 1 and 0, yes and no, correct and wrong) or empty fields. A column ``NAME``
            is about the first criterion, which is truth; ``NAME:info`` is about another.
        answers: the answers of the run.
        criteria: the criteria by which the answers are judged.

    Raises:
        DataError: the file is invalid.
        MissingExtraError: scikit-learn is not installed, which :func:`agreement` needs.
    """
    _kappa_score()
    people: dict[str, Labels] = {}
    first: dict[AnswerKey, str] = {}
    for where, value in read_records(find_file(file)):
        row = parsed(_Labels, value, where)
        key = row.arm, row.id
        if key not in answers:
            raise DataError(f"{where}: the run has no sample {row.id!r} of the arm {row.arm!r}")
        if key in first:
            raise DataError(f"{where}: the answer {row.id!r} of {row.arm!r} already has labels in {first[key]}")
        first[key] = where
        for name, cell in (row.model_extra or {}).items():
            if label := str(cell or "").strip().lower():
                if label not in (*_TRUE, *_FALSE):
                    raise DataError(f"{where}: the label {label!r} of {name!r} is neither true nor false")
                person, _, criterion = map(str.strip, name.partition(":"))
                if (criterion := criterion or criteria[0]) not in criteria or not person:
                    raise DataError(f"{where}: the column {name!r}; answers are judged by {', '.join(criteria)}")
                labels = people.setdefault(criterion, {}).setdefault(person, {})
                if key in labels:
                    raise DataError(f"{where}: two columns contain the labels of {person!r} about {criterion}")
                labels[key] = label in _TRUE
    if not people:
        raise DataError(f"{file} contains no labels: give a column for each annotator")
    return {criterion: dict(sorted(people[criterion].items())) for criterion in criteria if criterion in people}


def agreement(judged: Mapping[AnswerKey, bool | None], people: Labels) -> dict[str, Any]:
    """Cohen's kappa of the judge with each annotator, and of the annotators with each other.

    Returns:
        ``judge`` (by annotator) and ``people`` (by pair of annotators), each with ``kappa`` and the number of common
        labels, ``pairs``; ``mean_judge`` and ``mean_people``, the means of these kappas; ``ratio`` of the two means, as
        in the paper; and ``labelled``, by annotator. Kappa is ``None`` where it is undefined, because all labels are
        equal. Verdicts that are ``None`` are ignored.
    """
    verdicts = {key: verdict for key, verdict in judged.items() if verdict is not None}
    judge = {name: _kappa(verdicts, labels) for name, labels in people.items()}
    pairs = {f"{first}, {second}": _kappa(people[first], people[second]) for first, second in combinations(people, 2)}
    means = []
    for scores in (judge, pairs):
        defined = [score["kappa"] for score in scores.values() if score["kappa"] is not None]
        means.append(math.fsum(defined) / len(defined) if defined else None)
    with_judge, between = means
    return {
        "judge": judge,
        "people": pairs,
        "mean_judge": with_judge,
        "mean_people": between,
        "ratio": with_judge / between if with_judge is not None and between else None,
        "labelled": {name: len(labels) for name, labels in people.items()},
    }


def in_words(agreed: Mapping[str, Any], criterion: str) -> str:
    """The result of :func:`agreement` for a criterion, as Markdown."""
    lines = [f"Cohen's kappa, about {'informativeness' if criterion == 'info' else criterion}:", ""]
    scores = {f"judge and {name}": score for name, score in agreed["judge"].items()} | agreed["people"]
    for names, score in scores.items():
        kappa = "undefined, all labels are equal" if score["kappa"] is None else f"{score['kappa']:.3f}"
        lines.append(f"- {names}: {kappa} (labels in common: {score['pairs']})")
    if (ratio := agreed["ratio"]) is not None:
        lines += ["", f"The judge's mean kappa is {ratio:.2f} times that between annotators."]
    return "\n".join(lines) + "\n"


def _kappa(first: Mapping[AnswerKey, bool], second: Mapping[AnswerKey, bool]) -> dict[str, Any]:
    both = [key for key in first if key in second]
    pairs = [[labels[key] for key in both] for labels in (first, second)]
    kappa = float(_kappa_score()(*pairs)) if len({*pairs[0], *pairs[1]}) > 1 else math.nan
    return {"kappa": None if math.isnan(kappa) else kappa, "pairs": len(both)}


def _kappa_score() -> Any:
    return need("sklearn.metrics", extra="eval", what="Cohen's kappa").cohen_kappa_score
