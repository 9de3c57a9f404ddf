"""DiaSumFact (Zhu et al., 2023): dialogue summaries with factual errors, by sentence and by span, one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data.records import LabelledSpan, LabelledText
from cocoa_engine.lab.files import as_object, field, read_json

NO_ERROR = "No Error"
FILE = "annotations.json"

SEARCH_LIMIT = 10**8
"""Number of characters of sentences in which the spans of an answer's errors may be searched. Real ones need 10,000."""


def matches(path: Path) -> bool:
    """A folder with ``annotations.json``, or any JSON file (FaithBench files are detected first)."""
    return (path / FILE).exists() if path.is_dir() else path.suffix == ".json"


def read(path: Path) -> list[LabelledText]:
    """Read every model's summary of every dialogue.

    If an error's span is empty or not found in its sentence, the whole sentence is the hallucinated part.

    Raises:
        DataError: a field is missing or of a wrong type, a sentence is not in its summary, or an answer has more errors
            in longer sentences than can be searched.
    """
    file = path / FILE if path.is_dir() else path
    records = []
    for name, value in as_object(read_json(file), str(file)).items():
        where = f"{file}, dialogue {name}"
        dialogue = as_object(value, where)
        utterances = field(dialogue, "utterances", list, where)
        if not all(isinstance(one, str) for one in utterances):
            raise DataError(f"{where}: the utterances must be texts.")
        lines = "\n".join(utterances)
        query = field(dialogue, "query", str, where).strip()
        task = f"Summarise what the dialogue says to this question: {query}" if query else "Summarise the dialogue."
        for model, answer in field(dialogue, "annotations", dict, where).items():
            at = f"{where}, {model}"
            text = field(as_object(answer, at), "model_prediction", str, at)
            spans = _spans(text, field(answer, "sentence_annotations", list, at), at)
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


def _spans(text: str, sentences: list[Any], where: str) -> list[LabelledSpan]:
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
