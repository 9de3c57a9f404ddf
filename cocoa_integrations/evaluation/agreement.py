"""How far a judge agrees with people: Cohen's kappa, and the paper's ratio of it to that between people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError, MissingPackageError
from cocoa_integrations.evaluation.files import find_file, read_records

_TRUE = ("1", "true", "yes", "correct")
_FALSE = ("0", "false", "no", "wrong", "incorrect")


def agreement(judged: Mapping[tuple[str, str], bool | None], labels: Path) -> dict[str, Any]:
    """Cohen's kappa of the judge with each annotator, and, where there are several, of these with each other.

    Args:
        judged: the judge's verdicts by arm and sample id; those that are none are left out.
        labels: a CSV file with the columns ``arm`` (as in ``samples.jsonl``), ``id``, and one for each annotator, who
            says ``true`` or ``false`` (also 1 and 0, yes and no, correct and wrong), or leaves a field empty.

    Returns:
        ``judge`` (kappa by annotator), ``people`` (the mean kappa of their pairs), ``ratio`` (mean kappa with the
        judge / ``people``, as in the paper), and ``labelled``. A kappa that is not defined, where all labels are alike,
        is none.

    Raises:
        DataError: the file cannot be used.
        MissingPackageError: scikit-learn is not installed.
    """
    people: dict[str, dict[tuple[str, str], bool]] = {}
    for record in read_records(find_file(labels)):
        place = record.text("arm"), record.identity("id")
        if place not in judged:
            raise DataError(f"{record.where}: the run has no sample {place[1]!r} of the arm {place[0]!r}")
        for name in record.values.keys() - {"arm", "id"}:
            if given := str(record.values[name] or "").strip().lower():
                if given not in (*_TRUE, *_FALSE):
                    raise DataError(f"{record.where}: the label {given!r} of {name!r} is neither true nor false")
                people.setdefault(name, {})[place] = given in _TRUE
    if not people:
        raise DataError(f"{labels} holds no labels: give a column for each annotator")
    said = {place: verdict for place, verdict in judged.items() if verdict is not None}
    judge = {name: _kappa(said, labelled) for name, labelled in sorted(people.items())}
    pairs = [_kappa(first, second) for first, second in combinations(people.values(), 2)]
    with_judge, between = _mean(list(judge.values())), _mean(pairs)
    return {
        "judge": judge,
        "people": between,
        "ratio": with_judge / between if with_judge is not None and between else None,
        "labelled": {name: len(labelled) for name, labelled in sorted(people.items())},
    }


def _kappa(first: Mapping[tuple[str, str], bool], second: Mapping[tuple[str, str], bool]) -> float | None:
    try:
        from sklearn.metrics import cohen_kappa_score
    except ImportError as error:
        raise MissingPackageError("Cohen's kappa needs scikit-learn: pip install 'cocoa-integrations[eval]'") from error
    both = [place for place in first if place in second]
    pairs = [[labels[place] for place in both] for labels in (first, second)]
    if len({*pairs[0], *pairs[1]}) < 2:
        return None
    kappa = float(cohen_kappa_score(*pairs))
    return None if math.isnan(kappa) else kappa


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
