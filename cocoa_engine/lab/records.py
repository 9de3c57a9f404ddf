"""Labelled answers, and questions with known answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import TypeVar

from cocoa_engine.errors import DataError
from cocoa_engine.text_matching import contains

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
        source: the part of the prompt and the question that should support the answer. `None` if there is none.
    """

    id: str
    prompt: str
    text: str
    question: str
    label: bool | None
    spans: tuple[LabelledSpan, ...] | None
    group: str
    source: str | None = None

    def without_source(self) -> "LabelledText":
        """The record with the source removed from its prompt and question.

        Raises:
            ValueError: the record has no source.
        """
        if not self.source:
            raise ValueError(f"{self.id} has no source")
        prompt, question = (text.replace(self.source, "", 1) for text in (self.prompt, self.question))
        return replace(self, prompt=prompt, question=question)

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


def checked(records: Sequence[LabelledText], where: object, *, both_classes: bool = True) -> list[LabelledText]:
    """Check records before a measurement, and return them.

    Args:
        records: the records.
        where: where they were read from, for messages.
        both_classes: require hallucinated and supported answers or parts.

    Raises:
        DataError: there are no records; an id is repeated; a prompt or an answer is empty; a source is not in
            its prompt; a part is outside its answer, or there are more than 10,000 of them; or both classes are
            required and only one is labelled.
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
        if record.source is not None and not (record.source and record.source in record.prompt):
            raise DataError(f"{where}: the source of {record.id!r} is not in its prompt, word for word.")
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
    if both_classes and not classes >= {True, False}:
        only = "hallucinated" if True in classes else "supported"
        raise DataError(f"{where}: every label is {only!r}; both classes are needed.")
    return list(records)


@dataclass(frozen=True)
class Question:
    """A question with its known answers.

    Attributes:
        text: the question itself.
        context: the passage to answer from. `None`: the model answers from its own knowledge.
        answers: an answer is right if it contains one of these, see :meth:`is_right`.
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
        """Whether an answer contains a known answer word for word, ignoring case, punctuation and articles."""
        return contains(answer, self.answers)


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
