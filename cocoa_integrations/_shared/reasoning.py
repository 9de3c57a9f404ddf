"""Separates the reasoning of a model, its text between ``<think>`` and ``</think>``, from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_engine.report import Part, RiskReport

OPENING = "<think>"
CLOSING = "</think>"


@dataclass(frozen=True)
class Split:
    """A generated text, split.

    Attributes:
        reasoning: the text of the reasoning, without its tags and the whitespace around it.
        answer_start: the offset in the generated text at which the answer begins.
        parts: the part of each span; ``None`` if the model did not reason.
        answered: the generation with the spans of the answer only, and the risk of the answer.
    """

    reasoning: str
    answer_start: int
    parts: tuple[Part, ...] | None
    answered: Generation

    def part(self, number: int) -> Part | None:
        """The part of a span."""
        return None if self.parts is None else self.parts[number]

    def report(self, generation: Generation, *, rivals: bool = False) -> RiskReport:
        """The report of the generation that was split; ``rivals`` adds the candidates that competed in spans."""
        return RiskReport.of(
            generation,
            parts=self.parts,
            answer_start=self.answer_start,
            answered=self.answered,
            rivals=rivals,
        )

    def reasoning_tokens(self, generation: Generation) -> int:
        """The number of tokens of the reasoning, tags included."""
        return len(generation.token_ids) - len(self.answered.token_ids)


def split_generation(generation: Generation, engine: CocoaEngine, *, inside: bool = False) -> Split:
    """Split a complete answer, whose prompt may end ``inside`` the reasoning."""
    splitter = ReasoningSplitter(engine, inside=inside)
    for span in generation.spans:
        splitter.add(span)
    splitter.finish()
    if not splitter.reasons:
        return Split("", 0, None, generation)
    parts = tuple(splitter.part(span) or "answer" for span in generation.spans)
    spans = [span for span, part in zip(generation.spans, parts, strict=True) if part == "answer"]
    return Split(splitter.reasoning, splitter.answer_start, parts, _answered(generation, spans, engine))


def _answered(generation: Generation, spans: list[Span], engine: CocoaEngine) -> Generation:
    token_ids = [token_id for span in spans for token_id in span.token_ids]
    text = "".join(span.text for span in spans)
    answered = generation.model_copy(
        update={"spans": spans, "token_ids": token_ids, "text": text, "answer_risk": None, "competition": None}
    )
    answered = answered.model_copy(update={"out_of_domain": answered.has_spans_out_of_domain})
    calibrator = engine.calibrator_for(generation.config)
    return answered if calibrator is None else calibrator.rated(answered)


class ReasoningSplitter:
    """Splits an answer that arrives span by span.

    The reasoning begins with the generated text if the prompt ends inside it, and otherwise at a ``<think>`` that the
    model writes before any other visible text. It ends at ``</think>``. Both tags may be text, or special tokens, which
    decoding removes. The tags and the whitespace around the reasoning belong to neither part. ``text`` is the generated
    text so far.
    """

    def __init__(self, engine: CocoaEngine, *, inside: bool = False) -> None:
        self.text = ""
        self._inside = inside
        self._finished = False
        self._begin: int | None = None  # where the reasoning begins
        self._closing: tuple[int, int] | None = None  # start and end of the closing tag
        self._answers = False  # there is no reasoning
        self._searched = 0
        self._tags: list[tuple[int, str]] = []  # the special tokens among the tags, with their offsets
        self._special = _special_tags(engine)
        self._track = engine.detokenizer() if self._special else None

    def add(self, span: Span) -> None:
        """Add the next span."""
        self.text += span.text
        if self._track is not None:
            for token_id in span.token_ids:
                if tag := self._special.get(token_id):
                    self._tags.append((min(len(self._track.text), len(self.text)), tag))
                self._track.push(token_id)
        self._advance()

    def finish(self) -> None:
        """The answer is complete."""
        self._finished = True
        self._advance()

    @property
    def reasons(self) -> bool:
        """Whether the text so far has reasoning, which may be empty."""
        return self._begin is not None

    @property
    def settled(self) -> bool:
        """Whether it is known if there is visible reasoning. Until then, no text is passed on."""
        return self._finished or self._answers or self._closing is not None or bool(self.reasoning)

    @property
    def reasoning(self) -> str:
        """The reasoning so far. It only grows: an ending that may be the beginning of a tag is left out."""
        if self._begin is None:
            return ""
        if self._closing is not None:
            return self.text[self._begin : self._closing[0]].strip()
        reasoning = self.text[self._begin :]
        return (reasoning if self._finished else without_partial(reasoning, CLOSING)).strip()

    @property
    def answer_start(self) -> int:
        """The offset at which the answer begins; the end of the text so far if it has not begun."""
        if self._answers:
            return 0
        if self._closing is None:
            return len(self.text)
        rest = self.text[self._closing[1] :]
        return len(self.text) - len(rest.lstrip())

    def part(self, span: Span) -> Part | None:
        """The part that a span of the text so far belongs to; ``None`` without reasoning.

        A span with the closing tag belongs to the answer if it has visible text after the tag.
        """
        if self._begin is None:
            return None
        if self._closing is None or span.end <= self._closing[0]:
            return "reasoning"
        after = self._closing[1]
        return "answer" if span.start >= after or self.text[after : span.end].strip() else "reasoning"

    def _advance(self) -> None:
        if self._begin is None and not self._answers:
            self._open()
        if self._begin is not None and self._closing is None:
            self._close(self._begin)

    def _open(self) -> None:
        """Decide where the reasoning begins, as soon as that is known."""
        start = len(self.text) - len(self.text.lstrip())
        visible = self.text[start:]
        first, tag = next(iter(self._tags), (0, ""))
        if tag == OPENING and first <= start:
            self._begin = first
        elif visible.startswith(OPENING):
            self._begin = start + len(OPENING)
        elif self._finished or tag == CLOSING or not OPENING.startswith(visible):
            self._begin = 0 if self._inside else None
            self._answers = not self._inside

    def _close(self, begin: int) -> None:
        written = self.text.find(CLOSING, max(begin, self._searched))
        self._searched = len(self.text) - len(CLOSING) + 1
        removed = next((at for at, tag in self._tags if tag == CLOSING and at >= begin), -1)
        if removed >= 0 and not 0 <= written < removed:
            self._closing = (removed, removed)
        elif written >= 0:
            self._closing = (written, written + len(CLOSING))


def without_partial(text: str, tag: str) -> str:
    """A text without an ending that may be the beginning of a tag."""
    sizes: Sequence[int] = range(min(len(tag) - 1, len(text)), 0, -1)
    cut = next((size for size in sizes if text.endswith(tag[:size])), 0)
    return text[: len(text) - cut]


def _special_tags(engine: CocoaEngine) -> dict[int, str]:
    """The tags that are special tokens, by their ids."""
    added = getattr(engine.tokenizer, "added_tokens_decoder", {})
    tags = (OPENING, CLOSING)
    return {token_id: token.content for token_id, token in added.items() if token.special and token.content in tags}
