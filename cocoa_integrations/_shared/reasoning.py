"""Separates the reasoning of a model, such as its text between ``<think>`` and ``</think>``, from its answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_engine.report import Part, RiskReport

OPENING = "<think>"
CLOSING = "</think>"

Mark = tuple[int, str]
"""A special token that decoding has removed from a text: its offset, and its name."""


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around the reasoning: before and after it, and before the answer, where a header does."""

    opening: str = OPENING
    closing: str = CLOSING
    head: str = ""


class MarkedText:
    """A text with the special tokens that decoding has removed from it."""

    def __init__(self, text: str, marks: Sequence[Mark]) -> None:
        parts, at = list[str](), 0
        for offset, name in marks:
            parts += [text[at:offset], name]
            at = offset
        self.text = "".join([*parts, text[at:]])
        self._marks = marks

    def plain(self, at: int) -> int:
        """The offset in the text without its special tokens."""
        removed = 0
        for offset, name in self._marks:
            if offset + removed >= at:
                break
            removed += min(len(name), at - offset - removed)
        return at - removed


@dataclass(frozen=True)
class Split:
    """A generated text, split.

    Attributes:
        reasoning: the text of the reasoning, without its tags and the whitespace around it.
        answer_start: the offset in the generated text at which the answer begins.
        parts: the part of each span; ``None`` if the model did not reason.
        answered: the generation with the spans of the answer only, and the risk of the answer.
        marks: the special tokens of the format in the answer.
    """

    reasoning: str
    answer_start: int
    parts: tuple[Part, ...] | None
    answered: Generation
    marks: tuple[Mark, ...] = ()

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


def split_generation(
    generation: Generation,
    engine: CocoaEngine,
    *,
    inside: bool = False,
    tags: ReasoningTags | None = None,
    texts: Iterable[str] = (),
) -> Split:
    """Split a complete answer, whose prompt may end ``inside`` the reasoning; see :class:`ReasoningSplitter`."""
    splitter = ReasoningSplitter(engine, inside=inside, tags=tags, texts=texts)
    for span in generation.spans:
        splitter.add(span)
    splitter.finish()
    if not splitter.reasons:
        return Split("", splitter.answer_start, None, generation, splitter.marks)
    parts = tuple(splitter.part(span) or "answer" for span in generation.spans)
    spans = [span for span, part in zip(generation.spans, parts, strict=True) if part == "answer"]
    answered = _answered(generation, spans, engine)
    return Split(splitter.reasoning, splitter.answer_start, parts, answered, splitter.marks)


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

    The reasoning begins with the generated text if the prompt ends inside it, and otherwise at an opening tag that the
    model writes before any other visible text. It ends at the closing tag. Tags may be text, or special tokens, which
    decoding removes. The tags and the whitespace around the reasoning belong to neither part.

    Args:
        engine: the engine.
        inside: whether the prompt ends inside the reasoning.
        tags: what stands around the reasoning; ``<think>`` and ``</think>`` by default.
        texts: further texts whose special tokens are noted.

    Attributes:
        text: the generated text so far.
    """

    def __init__(
        self,
        engine: CocoaEngine,
        *,
        inside: bool = False,
        tags: ReasoningTags | None = None,
        texts: Iterable[str] = (),
    ) -> None:
        self.text = ""
        self._tags = tags or ReasoningTags()
        self._inside = inside
        self._finished = False
        self._begin: int | None = None  # where the reasoning begins; like the next, in the text with special tokens
        self._closing: tuple[int, int] | None = None  # start and end of the closing tag
        self._answers = False  # there is no reasoning
        self._searched = 0
        self._marks: list[Mark] = []
        self._marked = MarkedText("", ())
        self._special = _special_tokens(engine, [self._tags.opening, self._tags.closing, self._tags.head, *texts])
        self._track = engine.detokenizer() if self._special else None

    def add(self, span: Span) -> None:
        """Add the next span."""
        self.text += span.text
        if self._track is not None:
            for token_id in span.token_ids:
                if name := self._special.get(token_id):
                    self._marks.append((min(len(self._track.text), len(self.text)), name))
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
        end = len(self._marked.text)
        if self._closing is not None:
            end = self._closing[0]
        elif not self._finished:
            end = self._begin + len(without_partial(self._marked.text[self._begin :], self._tags.closing))
        return self.text[self._marked.plain(self._begin) : self._marked.plain(end)].strip()

    @property
    def answer_start(self) -> int:
        """The offset at which the answer begins; the end of the text so far if it has not begun."""
        return self._marked.plain(self._answer())

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The special tokens of the format in the answer so far."""
        start, removed, marks = self._answer(), 0, list[Mark]()
        for offset, name in self._marks:
            if offset + removed >= start:
                marks.append((offset, name))
            removed += len(name)
        return tuple(marks)

    def _answer(self) -> int:
        """Where the answer begins in the text with special tokens."""
        text, head = self._marked.text, self._tags.head
        if not self._answers and self._closing is None:
            return len(text)
        begin = 0 if self._closing is None else self._closing[1]
        visible = text[begin:].lstrip()
        if head and visible.startswith(head):
            return len(text) - len(visible[len(head) :].lstrip())
        if head and not self._finished and head.startswith(visible):
            return len(text)
        return 0 if self._closing is None else len(text) - len(visible)

    def part(self, span: Span) -> Part | None:
        """The part that a span of the text so far belongs to; ``None`` without reasoning.

        A span with the closing tag belongs to the answer if it has visible text after the tag.
        """
        if self._begin is None:
            return None
        if self._closing is None or span.end <= self._marked.plain(self._closing[0]):
            return "reasoning"
        after = self._marked.plain(self._closing[1])
        return "answer" if span.start >= after or self.text[after : span.end].strip() else "reasoning"

    def _advance(self) -> None:
        self._marked = MarkedText(self.text, self._marks)
        if self._begin is None and not self._answers:
            self._open()
        if self._begin is not None and self._closing is None:
            self._close(self._begin)

    def _open(self) -> None:
        """Decide where the reasoning begins, as soon as that is known."""
        visible, opening = self._marked.text.lstrip(), self._tags.opening
        if visible.startswith(opening):
            self._begin = len(self._marked.text) - len(visible) + len(opening)
        elif self._finished or not opening.startswith(visible):
            self._begin = 0 if self._inside else None
            self._answers = not self._inside

    def _close(self, begin: int) -> None:
        closing = self._tags.closing
        start = self._marked.text.find(closing, max(begin, self._searched))
        self._searched = len(self._marked.text) - len(closing) + 1
        if start >= 0:
            self._closing = (start, start + len(closing))


def without_partial(text: str, tag: str) -> str:
    """A text without an ending that may be the beginning of a tag."""
    sizes: Sequence[int] = range(min(len(tag) - 1, len(text)), 0, -1)
    cut = next((size for size in sizes if text.endswith(tag[:size])), 0)
    return text[: len(text) - cut]


def _special_tokens(engine: CocoaEngine, texts: Sequence[str]) -> dict[int, str]:
    """The special tokens in some texts, by their ids."""
    added = getattr(engine.tokenizer, "added_tokens_decoder", {})
    special = {token_id: token.content for token_id, token in added.items() if token.special and token.content}
    return {token_id: name for token_id, name in special.items() if any(name in text for text in texts)}
