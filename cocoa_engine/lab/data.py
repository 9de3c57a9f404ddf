"""Labelled answers, questions with known answers, and the files of both: a model of a row for each format, its reader,
and a registry."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

from pydantic import Field, RootModel, StrictBool, StrictInt, model_validator

from cocoa_engine.errors import DataError, unknown
from cocoa_engine.lab.files import (
    Row,
    RowModel,
    parsed,
    read_csv,
    read_json,
    read_json_lines,
    read_parquet,
    read_text,
    suffix_of,
)
from cocoa_engine.text_matching import contains, declines, normalized

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

MAX_PARTS = 10_000
"""Maximum number of labelled parts of an answer."""


@dataclass(frozen=True)
class LabelledSpan:
    """A labelled part of an answer.

    Attributes:
        start, end: character offsets in the answer's text, the end exclusive.
        kind: the label's name in the data set.
        hallucinated: whether it counts as hallucinated. Some data sets also mark harmless parts.
    """

    start: int
    end: int
    kind: str = "hallucinated"
    hallucinated: bool = True


@dataclass(frozen=True)
class LabelledText:
    """One answer to one prompt.

    Attributes:
        id: unique in its data set.
        prompt: the text before the answer, for a model to continue.
        text: the answer, as in the data set.
        question: the same request as a chat message, without cues such as ``Answer:`` for plain continuation.
        label: whether the answer as a whole is hallucinated. `None` if it is not labelled.
        spans: the labelled parts, ordered by start. `None` if only the whole answer is labelled.
        group: an id that answers to the same prompt share.
    """

    id: str
    prompt: str
    text: str
    question: str
    label: bool | None
    spans: tuple[LabelledSpan, ...] | None
    group: str

    def hallucinated_at(self, start: int, end: int) -> list[bool]:
        """Whether each character of a range is in a hallucinated part."""
        return [at < len(self._hallucinated) and self._hallucinated[at] for at in range(start, end)]

    @cached_property
    def _hallucinated(self) -> list[bool]:
        """Whether each character is in a hallucinated part, up to the end of the last one."""
        parts = [span for span in self.spans or () if span.hallucinated]
        changes = [0] * (max((span.end for span in parts), default=0) + 1)
        for span in parts:
            changes[span.start] += 1
            changes[span.end] -= 1
        return [depth > 0 for depth in accumulate(changes)]


def checked(records: Sequence[LabelledText], where: object) -> list[LabelledText]:
    """Check records before a measurement, and return them.

    Args:
        records: the records.
        where: where they were read from, for messages.

    Raises:
        DataError: there are no records; an id is repeated; a prompt or an answer is empty; a part is outside its
            answer, or there are more than 10,000 of them; or all labels are of one class.
    """
    if not records:
        raise DataError(f"{where} has no answers.")
    seen: set[str] = set()
    classes: set[bool | None] = set()
    for record in records:
        if record.id in seen:
            raise DataError(f"{where}: the id {record.id!r} is repeated; every answer needs its own id.")
        seen.add(record.id)
        for name, value in (("answer", record.text), ("prompt", record.prompt)):
            if not value.strip():
                raise DataError(f"{where}: the {name} of {record.id!r} is empty; give it a text or remove the record.")
        if record.spans is not None and len(record.spans) > MAX_PARTS:
            raise DataError(
                f"{where}: {record.id!r} has {len(record.spans)} labelled parts; an answer may have {MAX_PARTS}."
            )
        for span in record.spans or ():
            if not 0 <= span.start < span.end <= len(record.text):
                raise DataError(
                    f"{where}: the labelled part {span.start}..{span.end} of {record.id!r} is empty or lies outside "
                    f"the answer of {len(record.text)} characters."
                )
        if record.spans is None:
            classes.add(record.label)
        else:
            characters = zip(record.text, record.hallucinated_at(0, len(record.text)), strict=True)
            classes |= {hallucinated for character, hallucinated in characters if not character.isspace()}
    if not classes >= {True, False}:
        only = "hallucinated" if True in classes else "supported"
        raise DataError(f"{where}: every label is {only!r}; both classes are needed.")
    return list(records)


@dataclass(frozen=True)
class Question:
    """A question with its known answers.

    Attributes:
        text: the question itself.
        context: the passage to answer from. `None`: the model answers from its own knowledge.
        answers: the known answers; empty if the passage does not answer the question.
        group: questions with the same group are never divided between fitting and validation.
    """

    text: str
    context: str | None
    answers: tuple[str, ...]
    group: str

    @property
    def request(self) -> str:
        """The text that the model is asked."""
        if self.context is None:
            return f"{self.text}\nAnswer in a few words."
        task = "Answer the question from the passage, in a few words."
        return f"Passage: {self.context}\n\n{task}\nQuestion: {self.text}"

    def is_right(self, answer: str) -> bool:
        """Whether an answer contains a known answer word for word, ignoring case, punctuation and articles.

        Without a known answer, it is right if it says, in English, that the passage does not tell.
        """
        return contains(answer, self.answers) if self.answers else declines(answer)


Record = TypeVar("Record", LabelledText, Question)


def sample(records: Sequence[Record], prompts: int | None = None, seed: int = 0) -> list[Record]:
    """Draw some prompts and return their records, grouped by prompt.

    Args:
        records: the records of all prompts.
        prompts: the number of prompts to draw at random. `None` takes all.
        seed: the seed of the draw.
    """
    by: dict[str, list[Record]] = {}
    for record in records:
        by.setdefault(record.group, []).append(record)
    drawn = set(by if prompts is None or prompts >= len(by) else Random(seed).sample(list(by), prompts))
    return [record for name, same in by.items() if name in drawn for record in same]


# --- files of questions


class _Passage(RowModel):
    text: str


class ContextRow(RowModel):
    """A row with a passage to answer from. NQ has passages in ``ctxs``, of which the first is the context."""

    context: str | None = None
    ctxs: list[_Passage] | None = None

    @property
    def passage(self) -> str | None:
        return self.ctxs[0].text if self.context is None and self.ctxs else self.context


class _QuestionRow(ContextRow):
    """A row of one's own."""

    question: str
    answers: list[str]
    group: str | int | float | None = None

    @model_validator(mode="after")
    def _has_answers(self) -> "_QuestionRow":
        if not self.answers and self.passage is None:
            raise ValueError("Only a question with a context may have no answers")
        return self


class _SwapRow(RowModel):
    """A row of NQ-Swap: a question with its own passage, and with one in which the answer is swapped."""

    question: str
    org_context: str
    org_answer: list[str] = Field(min_length=1)
    sub_context: str
    sub_answer: list[str] = Field(min_length=1)


def read_questions(path: str | Path) -> list[Question]:
    """Read a file of questions. Repeated questions with the same context are read once.

    Raises:
        DataError: the file cannot be read, has no questions, or a question lacks a field or a usable answer.
        MissingExtraError: the file is parquet, and pyarrow is not installed.
    """
    path = Path(path)
    questions: dict[tuple[str, str | None], Question] = {}
    swapped: set[str] = set()
    is_parquet = path.suffix.lower() == ".parquet"
    for where, value in read_parquet(path) if is_parquet else read_json_lines(path):
        if is_parquet:
            swap = parsed(_SwapRow, value, where)
            if swap.question in swapped:  # the other rows swap in other answers
                continue
            swapped.add(text := swap.question)
            pairs = [(swap.org_context, swap.org_answer), (swap.sub_context, swap.sub_answer)]
            rows = [Question(text, context, tuple(answers), text) for context, answers in pairs]
        else:
            row = parsed(_QuestionRow, value, where)
            group = row.question if row.group is None else str(row.group)
            rows = [Question(row.question, row.passage, tuple(row.answers), group)]
        for question in rows:
            if not question.text.strip() or (question.answers and not any(map(normalized, question.answers))):
                raise DataError(f"{where}: the question is empty, or none of its answers contains a word.")
            questions.setdefault((question.text, question.context), question)
    if not questions:
        raise DataError(f"{path} has no questions.")
    return list(questions.values())


# --- formats of labelled answers

_Ranges = list[tuple[StrictInt, StrictInt]]


def _spans(ranges: _Ranges) -> tuple[LabelledSpan, ...]:
    return tuple(LabelledSpan(*ends) for ends in sorted(ranges))


class _Own(RowModel):
    id: str | StrictInt
    prompt: str
    text: str
    label: StrictBool | None = None
    spans: _Ranges | None = None
    group: str | int | float | None = None


def read_jsonl(path: Path) -> Iterator[LabelledText]:
    """Read your own labelled data: JSON lines with ``id``, ``prompt``, ``text`` and ``label`` or ``spans``.

    >>> {"id": "1", "prompt": "Who wrote Dune?", "text": "Frank Herbert, in 1865.", "spans": [[18, 22]]}

    ``label`` is true for a hallucinated answer. ``spans`` are the hallucinated parts as ``[start, end]`` in characters;
    an empty list means that there are none. ``group``, an id that answers to the same prompt share, is optional. The
    same answer has one label.
    """
    labels: dict[tuple[str, str], bool] = {}
    for where, value in read_json_lines(path):
        row = parsed(_Own, value, where)
        label = bool(row.spans) if row.label is None else row.label
        if row.label is None and row.spans is None:
            raise DataError(f"{where}: the answer has neither a label nor spans.")
        if row.spans is None and labels.setdefault((row.prompt, row.text), label) != label:
            raise DataError(f"{where}: the same answer to the same prompt has the other label in an earlier line.")
        spans = None if row.spans is None else _spans(row.spans)
        group = row.prompt if row.group is None else str(row.group)
        yield LabelledText(str(row.id), row.prompt, row.text, row.prompt, label, spans, group)


class _TruthfulQA(RowModel):
    question: str = Field(alias="Question", pattern=r"[^\s;]")
    best: str = Field(alias="Best Answer", pattern=r"[^\s;]")
    correct: str = Field(alias="Correct Answers", pattern=r"[^\s;]")
    incorrect: str = Field(alias="Incorrect Answers", pattern=r"[^\s;]")


def read_truthfulqa(path: Path) -> Iterator[LabelledText]:
    """Read every answer of a CSV file, or of a folder's ``TruthfulQA.csv``, as a record.

    The best answer to a question comes first, then the other true answers, then the false ones. An answer that is
    listed as both true and false becomes two records (the published file does so with "Unknown" for two questions).
    """
    for number, (where, value) in enumerate(read_csv(path / "TruthfulQA.csv" if path.is_dir() else path)):
        row = parsed(_TruthfulQA, value, where)
        question = row.question.strip()
        for kind, cells in (("true", [row.best, *row.correct.split(";")]), ("false", row.incorrect.split(";"))):
            answers = [answer.strip() for answer in cells if answer.strip()]
            for index, answer in enumerate(dict.fromkeys(answers)):
                name, prompt = f"{number}-{kind}-{index}", f"Question: {question}\nAnswer:"
                yield LabelledText(name, prompt, answer, question, kind == "false", None, str(number))


class _MuShroom(RowModel):
    id: str
    model_input: str
    model_output_text: str
    hard_labels: _Ranges


def read_mushroom(path: Path) -> Iterator[LabelledText]:
    """mu-SHROOM (SemEval 2025 task 3): answers of language models with hallucinated character spans, JSON lines.

    Read the answers of a file, or of all ``*.jsonl`` in a folder. The hard labels are the hallucinated parts.
    """
    for where, value in (row for file in _files(path, "*.jsonl") for row in read_json_lines(file)):
        row = parsed(_MuShroom, value, where)
        asked, label = row.model_input, bool(row.hard_labels)
        prompt, spans = f"Question: {asked}\nAnswer:", _spans(row.hard_labels)
        yield LabelledText(row.id, prompt, row.model_output_text, asked, label, spans, asked)


HALLUCINATED = "Unwanted"
"""The kind that counts as hallucinated. ``Benign`` and ``Questionable`` spans are read too, but do not count."""


class _Annotation(RowModel):
    label: list[str]
    summary_start: StrictInt
    summary_end: StrictInt

    def span(self) -> LabelledSpan:
        kind = self.label[0] if self.label else "unnamed"
        return LabelledSpan(self.summary_start, self.summary_end, kind, HALLUCINATED in self.label)


class _Sample(RowModel):
    sample_id: StrictInt
    source: str
    summary: str
    annotations: list[_Annotation]


class _Batch(RowModel):
    samples: list[_Sample]


def read_faithbench(path: Path) -> Iterator[LabelledText]:
    """FaithBench (Bao et al., 2025): summaries by ten language models with annotated spans.

    Read the summaries of a file, or of all ``batch_*.json`` in a folder.
    """
    for file in _files(path, "batch_*.json"):
        for row in parsed(_Batch, read_json(file), str(file)).samples:
            spans = sorted(map(_Annotation.span, row.annotations), key=lambda span: (span.start, span.end))
            task = "Summarise this passage in a few sentences, using only what it says."
            yield LabelledText(
                f"{file.stem}/{row.sample_id}",
                f"Passage: {row.source}\n\nSummary:",
                row.summary,
                f"{task}\n\n{row.source}",
                any(span.hallucinated for span in spans),
                tuple(spans),
                row.source,
            )


NO_ERROR = "No Error"

SEARCH_LIMIT = 10**8
"""Number of characters of sentences in which the spans of an answer's errors may be searched. Real ones need 10,000."""


class _Error(RowModel):
    error_class: str
    error_span: str | None = None


class _Sentence(RowModel):
    sentence: str
    annotation: list[_Error]


class _Summary(RowModel):
    model_prediction: str
    sentence_annotations: list[_Sentence]


class _Dialogue(RowModel):
    utterances: list[str]
    query: str
    annotations: dict[str, _Summary]


class _Dialogues(RootModel[dict[str, _Dialogue]]):
    pass


def read_diasumfact(path: Path) -> Iterator[LabelledText]:
    """DiaSumFact (Zhu et al., 2023): dialogue summaries with factual errors, by sentence and by span, one JSON file.

    Read every model's summary of every dialogue. If an error's span is empty or not found in its sentence, the whole
    sentence is the hallucinated part.
    """
    file = path / "annotations.json" if path.is_dir() else path
    for name, dialogue in parsed(_Dialogues, read_json(file), str(file)).root.items():
        lines, query = "\n".join(dialogue.utterances), dialogue.query.strip()
        task = f"Summarise what the dialogue says to this question: {query}" if query else "Summarise the dialogue."
        prompt, question = f"{lines}\n\n{task}\nSummary:", f"{task}\n\n{lines}"
        for model, summary in dialogue.annotations.items():
            spans, text = _errors(summary, f"{file}, dialogue {name}, {model}"), summary.model_prediction
            yield LabelledText(f"{name}/{model}", prompt, text, question, bool(spans), spans, name)


def _errors(summary: _Summary, where: str) -> tuple[LabelledSpan, ...]:
    spans: set[LabelledSpan] = set()
    text = summary.model_prediction
    after = searched = 0
    length = len(text.rstrip())
    for number, row in enumerate(summary.sentence_annotations):
        sentence = row.sentence.strip()
        while after < length and text[after].isspace():
            after += 1
        if 0 < length - after <= len(sentence) and sentence.startswith(text[after:length]):
            sentence = text[after:length]  # some summaries are cut off within their last sentence
        start = text.find(sentence, after)
        if start < 0:
            raise DataError(f"{where}, sentence {number} is not in the summary.")
        after = start + len(sentence)
        for error in row.annotation:
            if error.error_class == NO_ERROR:
                continue
            searched += len(sentence)
            if searched > SEARCH_LIMIT:
                raise DataError(f"{where}, sentence {number} is too long for its number of errors.")
            if error.error_span is None:
                raise DataError(f"{where}, sentence {number}: an error has no error_span.")
            part = error.error_span.strip()
            offset = sentence.find(part) if part else -1
            ends = (start, after) if offset < 0 else (start + offset, start + offset + len(part))
            spans.add(LabelledSpan(*ends, error.error_class))
    return tuple(sorted(spans, key=lambda span: (span.start, span.end, span.kind)))


_PARTS = ("docid", "source", "target", "label")


def read_xsum_token(path: Path) -> Iterator[LabelledText]:
    """XSum outputs with a hallucination label for every word (Zhou et al., 2021): folders of parallel text files.

    Each system's folder has a ``.docid``, ``.source``, ``.target`` and ``.label`` file with one line per summary. Read
    the summaries of a system's folder, or of every such folder in a folder. ``\\'`` is read as ``'``.
    """
    files = sorted([*path.glob("*.label"), *path.glob("*/*.label")])
    if not files:
        raise DataError(f"{path} has no .label file, and neither has a folder in it.")
    for file in files:
        lines = {part: read_text(file.with_suffix(f".{part}")).removesuffix("\n").split("\n") for part in _PARTS}
        if len({len(part) for part in lines.values()}) > 1:
            counts = ", ".join(f".{name} {len(part)}" for name, part in lines.items())
            raise DataError(f"{file.parent}: the files have different numbers of lines ({counts}).")
        for number, (doc, source, target, labels) in enumerate(zip(*lines.values(), strict=True), start=1):
            text = target.replace("\\'", "'").strip()
            spans = _labelled_words(text, labels.split(), f"{file}, line {number}")
            doc, source = doc.strip(), source.strip()
            prompt, question = (
                f"Article: {source}\n\nSummary in one sentence:",
                f"Summarise this article in one sentence.\n\n{source}",
            )
            yield LabelledText(f"{file.stem}/{doc}", prompt, text, question, bool(spans), spans, doc)


def _labelled_words(text: str, labels: list[str], where: str) -> tuple[LabelledSpan, ...]:
    """One span for each run of words labelled 1."""
    words = list(re.finditer(r"\S+", text))
    if len(words) != len(labels) or set(labels) - {"0", "1"}:
        raise DataError(f"{where}: {len(words)} words need as many labels 0 or 1, found {len(labels)}.")
    runs = groupby(zip(words, labels, strict=True), key=itemgetter(1))
    labelled = [[word for word, _ in run] for label, run in runs if label == "1"]
    return tuple(LabelledSpan(run[0].start(), run[-1].end()) for run in labelled)


def _files(path: Path, pattern: str) -> list[Path]:
    """The files of a folder that match a pattern, or the file itself."""
    return sorted(path.glob(pattern)) if path.is_dir() else [path]


class Reader(NamedTuple):
    """A format: its reader, patterns of files of which a folder has one, and the suffix of a single file.

    ``key`` is a key of the first object in a file, if that tells the format from others with this suffix.
    """

    read: Callable[[Path], Iterable[LabelledText]]
    in_folder: tuple[str, ...] = ()
    suffix: str | None = None
    key: str | None = None

    def matches(self, path: Path) -> bool:
        """Whether an existing file or folder looks like this format."""
        if path.is_dir():
            return any(file for pattern in self.in_folder for file in path.glob(pattern))
        if (suffix := suffix_of(path)) != self.suffix or self.key is None:
            return suffix == self.suffix
        rows: Iterator[Row] = read_json_lines(path) if self.suffix == ".jsonl" else iter([("", read_json(path))])
        _, first = next(rows, ("", None))
        return isinstance(first, Mapping) and self.key in first


READERS = {  # tried in order
    "truthfulqa": Reader(read_truthfulqa, ("TruthfulQA.csv",), ".csv"),
    "mushroom": Reader(read_mushroom, ("*.jsonl",), ".jsonl", "model_output_text"),
    "faithbench": Reader(read_faithbench, ("batch_*.json",), ".json", "samples"),
    "diasumfact": Reader(read_diasumfact, ("annotations.json",), ".json"),
    "xsum-token": Reader(read_xsum_token, ("*.label", "*/*.label")),
    "jsonl": Reader(read_jsonl, suffix=".jsonl"),
}

FORMATS = {name: reader.read for name, reader in READERS.items()}
"""The function that reads each format, by the format's name."""


def read_labelled(path: str | Path, format: str | None = None) -> list[LabelledText]:
    """Read a labelled data set and check it.

    Args:
        path: a file or folder.
        format: one of :data:`FORMATS`. Default: detected by :func:`detect_format`.

    Raises:
        DataError: the path does not exist, the format is unknown, the data is malformed, or its labels are of
            one class only.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}.")
    name = detect_format(path) if format is None else format
    if name not in FORMATS:
        raise DataError(unknown([name], FORMATS, what="format"))
    return checked(list(FORMATS[name](path)), path)


def detect_format(path: Path) -> str:
    """The format of a file or folder, by its file names and its first record.

    Raises:
        DataError: no format matches.
    """
    for name, reader in READERS.items():
        if reader.matches(path):
            return name
    raise DataError(f"the format of {path} is not known; name one of {', '.join(FORMATS)}.")
