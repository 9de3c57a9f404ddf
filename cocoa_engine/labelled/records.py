"""What a labelled data set gives: prompts, answers, and what in an answer is hallucinated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol, TypeVar

from cocoa_engine.errors import DataError


@dataclass(frozen=True)
class LabelledSpan:
    """A labelled part of an answer.

    Attributes:
        start, end: character offsets in the answer's text, the end exclusive.
        kind: the data set's own name for it.
        hallucinated: whether it counts as hallucinated; a data set may mark harmless parts too.
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
        prompt: what precedes the answer: text for a model to continue.
        text: the answer, as the data set has it.
        question: the same request without the cues for a plain model, for a chat.
        label: whether the answer as a whole is hallucinated; none where the set does not say.
        spans: its labelled parts, by their start; none if only the whole answer is labelled.
        group: answers to the same prompt share it.
        source: the part of prompt and question that the answer should be supported by; none if there is no such part.
    """

    id: str
    prompt: str
    text: str
    question: str
    label: bool | None
    spans: tuple[LabelledSpan, ...] | None
    group: str
    source: str | None = None

    def without_source(self) -> LabelledText:
        """The same with the source cut out of prompt and question.

        Raises:
            ValueError: there is none.
        """
        if not self.source:
            raise ValueError(f"{self.id} has no source")
        cut = {name: getattr(self, name).replace(self.source, "", 1) for name in ("prompt", "question")}
        return replace(self, **cut)

    def hallucinated_at(self, start: int, end: int) -> list[bool]:
        """Of each character of a range, whether it lies in a hallucinated part.

        Raises:
            ValueError: no part of this answer is labelled.
        """
        if self.spans is None:
            raise ValueError(f"only the whole answer {self.id} is labelled")
        parts = [(span.start, span.end) for span in self.spans if span.hallucinated]
        return [any(first <= at < last for first, last in parts) for at in range(start, end)]


def checked(records: Sequence[LabelledText], where: object, *, both_classes: bool = True) -> list[LabelledText]:
    """The records, if nothing in them would spoil a measurement.

    Args:
        where: what they were read from, for messages.
        both_classes: whether there must be hallucinated and supported ones.

    Raises:
        DataError: there are none; an id comes twice; a prompt or an answer is empty; a source is not in its
            prompt; a part lies outside its answer; or all labels are of one class, where both are asked for.
    """
    if not records:
        raise DataError(f"{where} holds no answers.")
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            raise DataError(f"{where}: the id {record.id!r} comes twice; every answer needs its own.")
        seen.add(record.id)
        for name, value in (("answer", record.text), ("prompt", record.prompt)):
            if not value.strip():
                raise DataError(f"{where}: the {name} of {record.id!r} is empty; give it a text or leave it out.")
        if record.source is not None and not (record.source and record.source in record.prompt):
            raise DataError(f"{where}: the source of {record.id!r} is not in its prompt, word for word.")
        for span in record.spans or ():
            if not 0 <= span.start < span.end <= len(record.text):
                raise DataError(
                    f"{where}: the labelled part {span.start}..{span.end} of {record.id!r} is empty or lies outside "
                    f"the answer of {len(record.text)} characters."
                )
    classes: set[bool] = set()
    for record in records:
        classes |= _classes(record)
    if both_classes and len(classes) < 2:
        only = "hallucinated" if classes == {True} else "supported"
        raise DataError(f"{where}: every label is {only!r}; nothing can be told apart. Give answers of both classes.")
    return list(records)


class Grouped(Protocol):
    """Belongs to a group: what shares a prompt."""

    @property
    def group(self) -> str: ...


Record = TypeVar("Record", bound=Grouped)


def sample(records: Sequence[Record], prompts: int | None = None, seed: int = 0) -> list[Record]:
    """The records of some prompts, those of the same prompt together.

    Args:
        prompts: at most this many, drawn at random; none takes all.
        seed: of the draw.
    """
    by: dict[str, list[Record]] = {}
    for record in records:
        by.setdefault(record.group, []).append(record)
    names = list(by)
    if prompts is not None and prompts < len(names):
        drawn = set(Random(seed).sample(names, prompts))
        names = [name for name in names if name in drawn]
    return [record for name in names for record in by[name]]


def _classes(record: LabelledText) -> set[bool]:
    if record.spans is None:
        return set() if record.label is None else {record.label}
    characters = zip(record.text, record.hallucinated_at(0, len(record.text)), strict=True)
    return {hallucinated for character, hallucinated in characters if not character.isspace()}
