"""Labelled answers as items to tell apart: whole answers, their spans between risk points, their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets import LabelledText
from cocoa_engine.methods import METHODS
from cocoa_engine.scoring.candidates import Grower
from cocoa_engine.scoring.text_profile import LayerProfile, Profiler, TextProfile
from cocoa_engine.spans import Candidate

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine


@dataclass(frozen=True)
class TeacherForced:
    """A labelled answer that was fed to the model.

    Attributes:
        record: the answer.
        profile: what was measured of its tokens.
        ends: where the characters of each token end in the record's text.
        bare: the same tokens after the prompt without its source, if that was asked for.
        candidates: of each token, the spans that decoding would weigh there, if that was asked for; none where no
            tokens compete, or the method grows none.
    """

    record: LabelledText
    profile: TextProfile
    ends: list[int]
    bare: TeacherForced | None = None
    candidates: Sequence[list[Candidate]] | None = None


@dataclass(frozen=True)
class Segment:
    """Some tokens of an answer as one span.

    Attributes:
        start, end: the tokens, the end exclusive.
        layers: of the mean-pooled span.
        hallucinated, supported: how many of its characters are, white space aside; for a whole answer with one label,
            1 and 0 or 0 and 1.
    """

    forced: TeacherForced
    start: int
    end: int
    layers: LayerProfile
    hallucinated: int
    supported: int


def force(
    engine: CocoaEngine,
    records: Iterable[LabelledText],
    config: CocoaConfig,
    *,
    chat: bool = False,
    bare: bool = False,
    grow: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[TeacherForced]:
    """Feed labelled answers to a model, each after its prompt; neighbours with the same prompt share its encoding.

    Args:
        config: its ``gamma`` and ``max_candidates`` say which tokens compete; for ``grow`` all that says how branches
            grow counts.
        chat: ask as a chat, with the model's template, instead of as a text to continue.
        bare: feed each answer once more, after its prompt without the source.
        grow: grow the candidates at every risk point.
        advance: told how many answers were fed.

    Raises:
        PromptError: an answer does not fit the context window after its prompt.
    """
    profiler = Profiler(engine.session, config)
    grower = Grower(engine.session, config) if grow and METHODS[config.method].branches else None
    for _, same in groupby(records, key=lambda record: record.prompt):
        together = list(same)
        first = together[0]
        prompt = _prompt(engine, first, chat)
        # a plain prompt ends with a colon, which a space follows; the answer's offsets count from its own first letter
        leads = ["" if chat or record.text[0].isspace() else " " for record in together]
        texts = [lead + record.text for lead, record in zip(leads, together, strict=True)]
        profiles = profiler(prompt, texts)
        without: Sequence[TextProfile | None] = [None] * len(together)
        if bare:
            bare_prompt = _prompt(engine, first.without_source(), chat)
            without = profiler(bare_prompt, [profile.token_ids for profile in profiles])
        ids = [profile.token_ids for profile in profiles]
        grown: Sequence[list[list[Candidate]] | None] = [None] * len(together)
        if grow:
            grown = [[[] for _ in each] for each in ids] if grower is None else grower(profiles[0].prompt, ids)
        for record, lead, text, profile, alone, candidates in zip(
            together, leads, texts, profiles, without, grown, strict=True
        ):
            dropped = text[0].isspace() and not profile.text[:1].isspace()
            shift = len(lead) - dropped
            ends = [min(max(end - shift, 0), len(record.text)) for end in profile.ends]
            bare_one = None if alone is None else TeacherForced(record, alone, ends)
            yield TeacherForced(record, profile, ends, bare_one, candidates)
        advance(len(together))


def _prompt(engine: CocoaEngine, record: LabelledText, chat: bool) -> str | list[int]:
    return engine.encode_chat([{"role": "user", "content": record.question}]) if chat else record.prompt


def answer(forced: TeacherForced) -> Segment:
    """The whole answer as one span, with its one label."""
    count = len(forced.profile.token_ids)
    label = bool(forced.record.label)
    return Segment(forced, 0, count, forced.profile.span(0, count), int(label), int(not label))


def spans(forced: TeacherForced) -> Iterator[Segment]:
    """The answer cut where more than one token competed, as decoding cuts it; spans of white space are left out.

    Decoding ends a span at the latest of its rivals' next risk points; here there are no rivals, so it ends at its own.
    It is also cut before a token that is not the most probable one: no decode would have gone on with that.
    """
    count = len(forced.profile.token_ids)
    cuts = [at for at in range(count) if at == 0 or begins_span(forced.profile, at)]
    for start, end in zip(cuts, [*cuts[1:], count], strict=True):
        segment = _segment(forced, start, end)
        if segment.hallucinated + segment.supported:
            yield segment


def begins_span(profile: TextProfile, at: int) -> bool:
    """Whether several tokens compete for a place, or the text takes another one than the most probable."""
    return profile.competing[at] > 1 or profile.gaps[at] > 0


def _segment(forced: TeacherForced, start: int, end: int) -> Segment:
    hallucinated, supported = _characters(forced, start, end)
    return Segment(forced, start, end, forced.profile.span(start, end), hallucinated, supported)


def _characters(forced: TeacherForced, start: int, end: int) -> tuple[int, int]:
    first, last = forced.ends[start - 1] if start else 0, forced.ends[end - 1]
    labels = zip(forced.record.hallucinated_at(first, last), forced.record.text[first:last], strict=True)
    visible = [label for label, character in labels if not character.isspace()]
    return sum(visible), len(visible) - sum(visible)


def token_labels(forced: TeacherForced) -> Sequence[tuple[int, int]]:
    """Of each token, how many of its characters are hallucinated and supported, white space aside."""
    return [_characters(forced, at, at + 1) for at in range(len(forced.ends))]
