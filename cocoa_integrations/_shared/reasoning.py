"""Separates the reasoning of a model, such as its text between ``<think>`` and ``</think>``, from its answer."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_engine.report import Part, RiskReport

OPENING = "<think>"
CLOSING = "</think>"

SPELLED = "\ue004"
"""The name of a mark inside a text that spells a special token: no tag of the format is found there."""

_LONGEST = 100  # characters of the name of a special token
_PART = r"\w+(?: [^<>=\n]{0,80})?(?:<[^<>]*>\w*)?"  # in a header: the name of a part and the type of its content
_BEGUN = r"(?:\w+(?: [^<>=\n]{0,80}(?:=\w*)?)?(?:<[^<>]*(?:>\w*)?)?)?"

Mark = tuple[int, str]
"""A special token that decoding has removed from a text: its offset, and its name."""

Replaced = tuple[int, int, str]
"""A range of a text, and what stands in its place."""


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around the reasoning of an answer.

    In some formats, an answer is a series of parts with headers, such as the channels of gpt-oss.

    Attributes:
        opening: the text before the reasoning; with headers, that of the reasoning.
        closing: the text after it; with headers, the text between two parts.
        head: the header of the answer; empty if the format has no headers.
        feet: tags after the text of an answer, and after its calls, but for the token that ends the turn.
        is_block: whether the template takes the reasoning as a block of the content, and not as a field.
        is_alone: whether the template refuses reasoning beside text and a call, because they share a part.
    """

    opening: str = OPENING
    closing: str = CLOSING
    head: str = ""
    feet: tuple[str, ...] = ()
    is_block: bool = False
    is_alone: bool = False

    @cached_property
    def _edges(self) -> tuple[str, str]:
        """The tags around the name of a part in its header; empty if not all headers have the same."""
        pairs = enumerate(zip(self.opening, self.head, strict=False))
        begin = self.opening[: next((at for at, (char, other) in pairs if char != other), 0)].rpartition(">")
        tag, end = "".join(begin[:2]), self.opening[self.opening.rfind("<") :]
        return (tag, end) if tag and self.head.endswith(end) else ("", "")

    def in_header(self, tag: str, before: bool) -> bool:
        """Whether a header goes on after a tag, and where there was one before it."""
        begin, end = self._edges
        return bool(begin) and (begin.endswith(tag) or (before and tag != end))

    @cached_property
    def header(self) -> re.Pattern[str]:
        """The header of a part that is text, with the space before it."""
        begin, end = map(re.escape, self._edges)
        others = f"|{begin}{_PART}{end}" if begin else ""
        return re.compile(
            rf"\s*(?!{re.escape(self.opening)})(?:{re.escape(self.head)}{others})" if self.head else "(?!)"
        )

    @cached_property
    def _begun(self) -> re.Pattern[str]:
        """The beginning of a header whose name is not complete, or whose end is not."""
        return re.compile(f"{re.escape(self._edges[0])}{_BEGUN}")

    @cached_property
    def later(self) -> re.Pattern[str]:
        """What stands before reasoning that follows another part."""
        return re.compile(rf"{re.escape(self.closing)}\s*{re.escape(self.opening)}" if self.head else "(?!)")

    def may_begin(self, text: str, *, surely: bool = False) -> bool:
        """Whether a text may be the beginning of a header; ``surely``: whether it has its first tag."""
        (begin, end), text = self._edges, text.lstrip()
        is_named = bool(begin) and end not in text and self._begun.fullmatch(without_partial(text, end)) is not None
        return is_named or (not surely and any(tag.startswith(text) for tag in (self.opening, self.head)))

    def hidden(self, text: str, start: int, opening: str = "", *, done: bool) -> list[Replaced]:
        """What is not shown of the answer from an offset on: headers, later reasoning, and what ends a part.

        In an answer that is not ``done``, so is an ending that may be one of these. The ``opening`` tag of calls stays.
        """
        ends = [*([self.closing] if self.head else []), *self.feet]
        ranges, searched = list[Replaced](), start
        for match in re.compile("|".join(map(re.escape, ends)) or "(?!)").finditer(text, start):
            at, end, shown = match.start(), match.end(), ""
            begins_calls = text.startswith(opening, at) or (not done and opening.startswith(text[at:]))
            if at < searched or (opening and begins_calls):
                continue
            if thought := self.later.match(text, at):
                following = text.find(self.closing, thought.end())
                end = len(text) if following < 0 else following
            elif header := self.header.match(text, end):
                end, shown = header.end(), "\n\n" if text[start:at].strip() else ""
            elif self.head and self.may_begin(text[end:]):
                end = len(text)
            else:
                end = len(text) - len(text[end:].lstrip())
            ranges.append((at, end, shown))
            searched = end
        if not done:
            rest = text[max(start, searched) :]
            ranges.append(
                (len(text) - len(rest) + min(len(without_partial(rest, end)) for end in ["", *ends]), len(text), "")
            )
        return ranges


def spliced(text: str, ranges: Iterable[Replaced]) -> str:
    """A text with other texts in the place of ranges, which are in order."""
    parts, position = list[str](), 0
    for start, end, new in ranges:
        parts += [text[position:start], new]
        position = end
    return "".join([*parts, text[position:]])


class MarkedText:
    """A text with the special tokens that decoding has removed from it."""

    def __init__(self, text: str, marks: Sequence[Mark]) -> None:
        self.text = spliced(text, [(offset, offset, name) for offset, name in marks])
        self._marks = marks
        self._replaced: Sequence[Replaced] = ()

    def replace(self, ranges: Sequence[Replaced]) -> None:
        """Replace ranges of the text, which are in order."""
        self._replaced = ranges
        self.text = spliced(self.text, ranges)

    def plain(self, at: int) -> int:
        """The offset in the text without its special tokens."""
        for start, end, shown in self._replaced:
            at = max(at - len(shown), start) + end - start if at >= start else at
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
        update={
            "spans": spans,
            "token_ids": token_ids,
            "text": text,
            "answer_risk": None,
            "answer_risk_source": None,
            "answer_out_of_domain": False,
        }
    )
    answered = answered.model_copy(update={"out_of_domain": answered.has_spans_out_of_domain})
    return answered if generation.answer_risk is None else engine.rated(answered)


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
        self._reasoning: list[tuple[int, int, int | None]] = []  # each part: its start, with the text before it, its
        # own first character, and its end, once that is known; like the next, in the text with special tokens
        self._answers = False  # there is no reasoning
        self._searched = 0
        self._marks: list[Mark] = []
        self._marked = MarkedText("", ())
        own, special = self._tags, _special_tokens(engine)
        written = [own.opening, own.closing, own.head, *own.feet, *texts]
        self._special = {number: name for number, name in special.items() if any(name in text for text in written)}
        self._others: dict[int, str] = {}  # those that a header may have beside them
        self._header = False  # whether the text is inside a header
        self._spelled: re.Pattern[str] | None = None
        if own.head and special:
            self._others = {number: name for number, name in special.items() if number not in engine.end_token_ids}
            names = {*self._special.values(), *self._others.values()}
            self._spelled = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._track = engine.detokenizer() if self._special else None

    def add(self, span: Span) -> None:
        """Add the next span."""
        start = len(self.text)
        self.text += span.text
        if self._track is not None:
            for token_id in span.token_ids:
                name = self._special.get(token_id)
                if name is None and self._header:
                    name = self._others.get(token_id)
                if name is not None:
                    self._marks.append((min(len(self._track.text), len(self.text)), name))
                    self._header = self._tags.in_header(name, self._header)
                self._track.push(token_id)
        if self._spelled is not None:
            spelled = self._spelled.finditer(self.text, max(0, start - _LONGEST))
            if marks := [(match.start() + 1, SPELLED) for match in spelled if match.end() > start]:
                self._marks = sorted([*self._marks, *marks], key=itemgetter(0))
        self._advance()

    def finish(self) -> None:
        """The answer is complete."""
        self._finished = True
        self._advance()

    @property
    def reasons(self) -> bool:
        """Whether the text so far has reasoning, which may be empty."""
        return bool(self._reasoning)

    @property
    def settled(self) -> bool:
        """Whether it is known if there is visible reasoning. Until then, no text is passed on."""
        return self._finished or self._answers or self._is_closed or bool(self.reasoning)

    @property
    def _is_closed(self) -> bool:
        """Whether the first part of the reasoning has ended."""
        return bool(self._reasoning) and self._reasoning[0][2] is not None

    @property
    def reasoning(self) -> str:
        """The reasoning so far. It only grows: an ending that may be the beginning of a tag is left out."""
        texts = []
        for _, begin, end in self._reasoning:
            if end is None:
                written = self._marked.text[begin:]
                end = begin + len(written if self._finished else without_partial(written, self._tags.closing))
            texts.append(self.text[self._marked.plain(begin) : self._marked.plain(end)].strip())
        return "\n\n".join(filter(None, texts))

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
        text, tags, begin, after = self._marked.text, self._tags, 0, 0
        if not self._answers and not self._is_closed:
            return len(text)
        for start, _, end in self._reasoning:
            if start > begin:
                break
            begin = len(text) if end is None else end
            after = min(begin + len(tags.closing), len(text))
        if header := tags.header.match(text, after):
            after = header.end()
        elif tags.head and tags.may_begin(text[after:], surely=self._finished and not after):
            return len(text)
        return len(text) - len(text[after:].lstrip()) if after else 0

    def part(self, span: Span) -> Part | None:
        """The part that a span of the text so far belongs to; ``None`` without reasoning.

        A span with a closing tag belongs to the answer if it has visible text after the tag.
        """
        if not self._reasoning:
            return None
        begin = 0
        for start, _, end in self._reasoning:
            if self.text[max(begin, span.start) : min(self._marked.plain(start), span.end)].strip():
                return "answer"
            if end is None:
                return "reasoning"
            begin = self._marked.plain(end + len(self._tags.closing))
            if span.end <= self._marked.plain(end):
                return "reasoning"
        return "answer" if span.start >= begin or self.text[begin : span.end].strip() else "reasoning"

    def _advance(self) -> None:
        self._marked = MarkedText(self.text, self._marks)
        if not self._reasoning and not self._answers:
            self._open()
        text, closing = self._marked.text, self._tags.closing
        while self._reasoning or self._answers:
            if self._reasoning and self._reasoning[-1][2] is None:
                start, begin, _ = self._reasoning[-1]
                end = text.find(closing, max(begin, self._searched))
                if end < 0:
                    self._searched = len(text) - len(closing) + 1
                    return
                self._reasoning[-1] = start, begin, end
                self._searched = end
            following = self._tags.later.search(text, self._searched)
            if following is None:
                return
            self._reasoning.append((following.start(), following.end(), None))

    def _open(self) -> None:
        """Decide where the reasoning begins, as soon as that is known."""
        visible, opening = self._marked.text.lstrip(), self._tags.opening
        if visible.startswith(opening):
            self._reasoning.append((0, len(self._marked.text) - len(visible) + len(opening), None))
        elif self._finished or not opening.startswith(visible):
            self._reasoning += [(0, 0, None)] if self._inside else []
            self._answers = not self._inside


def without_partial(text: str, tag: str) -> str:
    """A text without an ending that may be the beginning of a tag."""
    sizes: Sequence[int] = range(min(len(tag) - 1, len(text)), 0, -1)
    cut = next((size for size in sizes if text.endswith(tag[:size])), 0)
    return text[: len(text) - cut]


def _special_tokens(engine: CocoaEngine) -> dict[int, str]:
    """The special tokens by their ids."""
    added = getattr(engine.tokenizer, "added_tokens_decoder", {})
    return {token_id: token.content for token_id, token in added.items() if token.special and token.content}
