"""Labelled data sets: one reader for each format, and the registry of formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cocoa_engine.errors import DataError
from cocoa_engine.lab.files import as_object, field, plain_text, read_csv, read_json, read_json_lines, read_text
from cocoa_engine.lab.records import LabelledSpan, LabelledText, Question, checked, read_questions, sample
from cocoa_engine.messages import unknown
from cocoa_engine.safe_text import short_repr

__all__ = [
    "FORMATS",
    "LabelledSpan",
    "LabelledText",
    "Question",
    "checked",
    "detect_format",
    "read_labelled",
    "read_questions",
    "sample",
]


def matches_jsonl(path: Path) -> bool:
    """A file of JSON lines (mu-SHROOM files are detected first)."""
    return not path.is_dir() and path.suffix == ".jsonl"


def read_jsonl(path: Path) -> list[LabelledText]:
    """Read your own labelled data: JSON lines with ``id``, ``prompt``, ``text`` and ``label`` or ``spans``.

    >>> {"id": "1", "prompt": "Who wrote Dune?", "text": "Frank Herbert, in 1865.", "spans": [[18, 22]]}

    ``label`` is true for a hallucinated answer. ``spans`` are the hallucinated parts as ``[start, end]`` in characters;
    an empty list means that there are none. Two fields are optional: ``group``, an id that answers to the same prompt
    share, and ``source``, the part of the prompt that should support the answer, word for word.

    Raises:
        DataError: a field is missing or of a wrong type, or the same answer has both labels.
    """
    records = []
    labels: dict[tuple[str, str], bool] = {}
    for where, row in read_json_lines(path):
        prompt = field(row, "prompt", str, where)
        spans: tuple[LabelledSpan, ...] | None = None
        if "spans" in row:
            pairs = field(row, "spans", list, where)
            if any(not isinstance(pair, list) or [type(end) for end in pair] != [int, int] for pair in pairs):
                raise DataError(f"{where}: each of the spans must be [start, end].")
            spans = tuple(LabelledSpan(*pair) for pair in sorted(pairs))
        label = bool(spans) if spans is not None and "label" not in row else field(row, "label", bool, where)
        text = field(row, "text", str, where)
        if spans is None and labels.setdefault((prompt, text), label) != label:
            raise DataError(f"{where}: the same answer to the same prompt has the other label in an earlier line.")
        records.append(
            LabelledText(
                id=str(field(row, "id", (str, int), where)),
                prompt=prompt,
                text=text,
                question=prompt,
                label=label,
                spans=spans,
                group=plain_text(row.get("group", prompt), "group", where),
                source=field(row, "source", str, where) if "source" in row else None,
            )
        )
    return records


TRUTHFULQA_FILE = "TruthfulQA.csv"
COLUMNS = ("Question", "Best Answer", "Correct Answers", "Incorrect Answers")


def matches_truthfulqa(path: Path) -> bool:
    """A folder with ``TruthfulQA.csv``, or any CSV file."""
    return (path / TRUTHFULQA_FILE).exists() if path.is_dir() else path.suffix == ".csv"


def read_truthfulqa(path: Path) -> list[LabelledText]:
    """Read every answer of a CSV file, or of a folder's ``TruthfulQA.csv``, as a record.

    The best answer to a question comes first, then the other true answers, then the false ones. An answer that is
    listed as both true and false becomes two records (the published file does so with "Unknown" for two questions).

    Raises:
        DataError: a column is missing, or a question or its answers are empty.
    """
    records = []
    file = path / TRUTHFULQA_FILE if path.is_dir() else path
    for number, (where, row) in enumerate(read_csv(file, COLUMNS)):
        if empty := [name for name in COLUMNS if not row[name].strip(" ;")]:
            raise DataError(f"{where}: the column {empty[0]!r} is empty.")
        question, best = row["Question"].strip(), row["Best Answer"].strip()
        true = list(dict.fromkeys([best, *_answers(row["Correct Answers"])]))
        false = list(dict.fromkeys(_answers(row["Incorrect Answers"])))
        for label, answers in ((False, true), (True, false)):
            for index, answer in enumerate(answers):
                records.append(
                    LabelledText(
                        id=f"{number}-{'false' if label else 'true'}-{index}",
                        prompt=f"Question: {question}\nAnswer:",
                        text=answer,
                        question=question,
                        label=label,
                        spans=None,
                        group=str(number),
                    )
                )
    return records


def _answers(cell: str) -> list[str]:
    return [answer.strip() for answer in cell.split(";") if answer.strip()]


def matches_mushroom(path: Path) -> bool:
    """A folder with JSON lines, or JSON lines with the field ``model_output_text``."""
    if path.is_dir():
        return any(path.glob("*.jsonl"))
    if path.suffix != ".jsonl":
        return False
    _, first = next(read_json_lines(path), ("", {}))
    return "model_output_text" in first


def read_mushroom(path: Path) -> list[LabelledText]:
    """mu-SHROOM (SemEval 2025 task 3): answers of language models with hallucinated character spans, JSON lines.

    Read the answers of a file, or of all ``*.jsonl`` in a folder. The hard labels are the hallucinated parts.

    Raises:
        DataError: a field is missing or of a wrong type.
    """
    records = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for where, row in read_json_lines(file):
            question = field(row, "model_input", str, where)
            spans = []
            for pair in field(row, "hard_labels", list, where):
                if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
                    raise DataError(f"{where}: a hard label must be [start, end], not {short_repr(pair)}.")
                spans.append(LabelledSpan(*pair))
            records.append(
                LabelledText(
                    id=field(row, "id", str, where),
                    prompt=f"Question: {question}\nAnswer:",
                    text=field(row, "model_output_text", str, where),
                    question=question,
                    label=bool(spans),
                    spans=tuple(sorted(spans, key=lambda span: span.start)),
                    group=question,
                )
            )
    return records


HALLUCINATED = "Unwanted"
"""The kind that counts as hallucinated. ``Benign`` and ``Questionable`` spans are read too, but do not count."""


def matches_faithbench(path: Path) -> bool:
    """A folder with ``batch_*.json``, or a JSON file with ``samples``."""
    if path.is_dir():
        return any(path.glob("batch_*.json"))
    if path.suffix != ".json":
        return False
    value = read_json(path)
    return isinstance(value, dict) and "samples" in value


def read_faithbench(path: Path) -> list[LabelledText]:
    """FaithBench (Bao et al., 2025): summaries by ten language models with annotated spans.

    Read the summaries of a file, or of all ``batch_*.json`` in a folder.

    Raises:
        DataError: a field is missing or of a wrong type.
    """
    records = []
    for file in sorted(path.glob("batch_*.json")) if path.is_dir() else [path]:
        samples = field(as_object(read_json(file), str(file)), "samples", list, str(file))
        for number, value in enumerate(samples):
            where = f"{file}, sample {number}"
            sample = as_object(value, where)
            source = field(sample, "source", str, where)
            spans = [_span(as_object(one, where), where) for one in field(sample, "annotations", list, where)]
            question = f"Summarise this passage in a few sentences, using only what it says.\n\n{source}"
            records.append(
                LabelledText(
                    id=f"{file.stem}/{field(sample, 'sample_id', int, where)}",
                    prompt=f"Passage: {source}\n\nSummary:",
                    text=field(sample, "summary", str, where),
                    question=question,
                    label=any(span.hallucinated for span in spans),
                    spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
                    group=source,
                    source=source or None,
                )
            )
    return records


def _span(annotation: Mapping[str, Any], where: str) -> LabelledSpan:
    kinds = field(annotation, "label", list, where)
    kind = plain_text(kinds[0], "label", where) if kinds else "unnamed"
    start, end = (field(annotation, f"summary_{side}", int, where) for side in ("start", "end"))
    return LabelledSpan(start, end, kind, HALLUCINATED in kinds)


NO_ERROR = "No Error"
DIASUMFACT_FILE = "annotations.json"

SEARCH_LIMIT = 10**8
"""Number of characters of sentences in which the spans of an answer's errors may be searched. Real ones need 10,000."""


def matches_diasumfact(path: Path) -> bool:
    """A folder with ``annotations.json``, or any JSON file (FaithBench files are detected first)."""
    return (path / DIASUMFACT_FILE).exists() if path.is_dir() else path.suffix == ".json"


def read_diasumfact(path: Path) -> list[LabelledText]:
    """DiaSumFact (Zhu et al., 2023): dialogue summaries with factual errors, by sentence and by span, one JSON file.

    Read every model's summary of every dialogue.

    If an error's span is empty or not found in its sentence, the whole sentence is the hallucinated part.

    Raises:
        DataError: a field is missing or of a wrong type, a sentence is not in its summary, or an answer has more errors
            in longer sentences than can be searched.
    """
    file = path / DIASUMFACT_FILE if path.is_dir() else path
    records = []
    for name, value in as_object(read_json(file), str(file)).items():
        where = f"{file}, dialogue {name}"
        dialogue = as_object(value, where)
        utterances = field(dialogue, "utterances", list, where)
        if not all(isinstance(utterance, str) for utterance in utterances):
            raise DataError(f"{where}: the utterances must be texts.")
        lines = "\n".join(utterances)
        query = field(dialogue, "query", str, where).strip()
        task = f"Summarise what the dialogue says to this question: {query}" if query else "Summarise the dialogue."
        for model, answer in field(dialogue, "annotations", dict, where).items():
            at = f"{where}, {model}"
            text = field(as_object(answer, at), "model_prediction", str, at)
            spans = _errors(text, field(answer, "sentence_annotations", list, at), at)
            records.append(
                LabelledText(
                    id=f"{name}/{model}",
                    prompt=f"{lines}\n\n{task}\nSummary:",
                    text=text,
                    question=f"{task}\n\n{lines}",
                    label=bool(spans),
                    spans=tuple(spans),
                    group=name,
                    source=lines or None,
                )
            )
    return records


def _errors(text: str, sentences: list[Any], where: str) -> list[LabelledSpan]:
    found: set[LabelledSpan] = set()
    after = searched = 0
    length = len(text.rstrip())
    for number, value in enumerate(sentences):
        at = f"{where}, sentence {number}"
        sentence = field(as_object(value, at), "sentence", str, at).strip()
        while after < length and text[after].isspace():
            after += 1
        if 0 < length - after <= len(sentence) and sentence.startswith(text[after:length]):
            sentence = text[after:length]  # some summaries are cut off within their last sentence
        start = text.find(sentence, after)
        if start < 0:
            raise DataError(f"{at} is not in the summary.")
        after = start + len(sentence)
        for error in field(value, "annotation", list, at):
            kind = field(as_object(error, at), "error_class", str, at)
            if kind == NO_ERROR:
                continue
            part = field(error, "error_span", str, at).strip()
            searched += len(sentence)
            if searched > SEARCH_LIMIT:
                raise DataError(f"{at} is too long for its number of errors.")
            offset = sentence.find(part) if part else -1
            found.add(
                LabelledSpan(start + offset, start + offset + len(part), kind)
                if offset >= 0
                else LabelledSpan(start, after, kind)
            )
    return sorted(found, key=lambda span: (span.start, span.end, span.kind))


_PARTS = ("docid", "source", "target", "label")


def matches_xsum_token(path: Path) -> bool:
    """A folder with ``.label`` files, or with folders that have them."""
    return path.is_dir() and (any(path.glob("*.label")) or any(path.glob("*/*.label")))


def read_xsum_token(path: Path) -> list[LabelledText]:
    """XSum outputs with a hallucination label for every word (Zhou et al., 2021): folders of parallel text files.

    Each system's folder has a ``.docid``, ``.source``, ``.target`` and ``.label`` file with one line per summary.

    Read the summaries of a system's folder, or of every such folder in a folder. ``\\'`` is read as ``'``.

    Raises:
        DataError: a file is missing, the files have different numbers of lines, or the labels of a summary do
            not match its words.
    """
    labels = sorted([*path.glob("*.label"), *path.glob("*/*.label")])
    if not labels:
        raise DataError(f"{path} has no .label file, and neither has a folder in it.")
    return [record for file in labels for record in _system(file)]


def _system(labels: Path) -> list[LabelledText]:
    lines = {part: read_text(labels.with_suffix(f".{part}")).removesuffix("\n").split("\n") for part in _PARTS}
    if len({len(part) for part in lines.values()}) > 1:
        counts = ", ".join(f".{name} {len(part)}" for name, part in lines.items())
        raise DataError(f"{labels.parent}: the files have different numbers of lines ({counts}).")
    records = []
    for number, (doc, source, target, label) in enumerate(zip(*lines.values(), strict=True), start=1):
        text = target.replace("\\'", "'").strip()
        spans = _labelled_words(text, label.split(), f"{labels}, line {number}")
        records.append(
            LabelledText(
                id=f"{labels.stem}/{doc.strip()}",
                prompt=f"Article: {source.strip()}\n\nSummary in one sentence:",
                text=text,
                question=f"Summarise this article in one sentence.\n\n{source.strip()}",
                label=bool(spans),
                spans=spans,
                group=doc.strip(),
                source=source.strip() or None,
            )
        )
    return records


def _labelled_words(text: str, labels: list[str], where: str) -> tuple[LabelledSpan, ...]:
    """One span for each run of words labelled 1."""
    words = text.split()
    if len(words) != len(labels) or set(labels) - {"0", "1"}:
        raise DataError(f"{where}: {len(words)} words need as many labels 0 or 1, found {len(labels)}.")
    spans: list[LabelledSpan] = []
    end, before = 0, "0"
    for word, label in zip(words, labels, strict=True):
        start = text.index(word, end)
        end = start + len(word)
        if label == "1":
            spans.append(LabelledSpan(spans.pop().start if before == "1" else start, end))
        before = label
    return tuple(spans)


class Reader(NamedTuple):
    """The two functions of a format.

    Attributes:
        read: reads a file or folder of this format.
        matches: whether an existing file or folder looks like this format. Formats are tried in the registry's order.
    """

    read: Callable[[Path], list[LabelledText]]
    matches: Callable[[Path], bool]


READERS = {
    "truthfulqa": Reader(read_truthfulqa, matches_truthfulqa),
    "mushroom": Reader(read_mushroom, matches_mushroom),
    "faithbench": Reader(read_faithbench, matches_faithbench),
    "diasumfact": Reader(read_diasumfact, matches_diasumfact),
    "xsum-token": Reader(read_xsum_token, matches_xsum_token),
    "jsonl": Reader(read_jsonl, matches_jsonl),
}

FORMATS: dict[str, Callable[[Path], list[LabelledText]]] = {name: reader.read for name, reader in READERS.items()}
"""The function that reads each format, by the format's name."""


def read_labelled(path: str | Path, format: str | None = None, *, both_classes: bool = True) -> list[LabelledText]:
    """Read a labelled data set and check it.

    Args:
        path: a file or folder.
        format: one of :data:`FORMATS`. Default: detected by :func:`detect_format`.
        both_classes: require hallucinated and supported answers or parts.

    Raises:
        DataError: the path does not exist, the format is unknown, the data is malformed, or its labels are of
            one class only although both are required.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}.")
    name = detect_format(path) if format is None else format
    if name not in FORMATS:
        raise DataError(unknown([name], FORMATS, what="format"))
    return checked(FORMATS[name](path), path, both_classes=both_classes)


def detect_format(path: Path) -> str:
    """The format of a file or folder, by its file names and its first record.

    Raises:
        DataError: no format matches.
    """
    for name, reader in READERS.items():
        if reader.matches(path):
            return name
    raise DataError(f"the format of {path} is not known; name one of {', '.join(FORMATS)}.")
