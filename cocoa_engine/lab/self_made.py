"""Labelled texts that need no data set: invented passages, and retellings of them with planted errors."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.cache import CacheFolder
from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.fit import LabelledFeatures, auroc_left_out
from cocoa_engine.lab.measured import force, labelled_features

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

_TEMPLATES: Mapping[str, Any] = json.loads(Path(__file__).with_name("invented.json").read_text(encoding="utf-8"))

STATED, FILLERS = 5, 2
"""The number of facts that a passage states, the others being left out, and of its sentences without a fact."""


@dataclass(frozen=True)
class Fact:
    """A fact about a subject, as :func:`passages` makes it.

    Attributes:
        sentence: a sentence that states it.
        question: the question for it.
        answers: its value, and other ways to write it.
        retold: another sentence that states it, with ``{value}`` for the value.
        false_value: another value of the same kind.
    """

    sentence: str
    question: str
    answers: tuple[str, ...]
    retold: str
    false_value: str


@dataclass(frozen=True)
class Passage:
    """A passage about an invented subject, the facts that it states, and facts of the subject that it does not."""

    text: str
    stated: tuple[Fact, ...]
    missing: tuple[Fact, ...]


def passages(seed: int = 0) -> Iterator[Passage]:
    """Invented passages without end, the same for the same seed."""
    random = Random(seed)
    while True:
        kind = random.choice(_TEMPLATES["kinds"])
        subject = _subject(kind["subject"], random)
        facts = []
        for template in random.sample(kind["facts"], len(kind["facts"])):
            answers = _value(template, random)
            sentence = random.choice(template["sentences"]).format(subject=subject, value=answers[0])
            question = template["question"].format(subject=subject)
            again = Random(f"{subject} {answers[0]}")  # another sentence and a false value do not change the passage
            retold = again.choice(template["sentences"]).format(subject=subject, value="{value}")
            values = (_value(template, again)[0] for _ in itertools.count())
            false_value = next(value for value in values if value not in answers)
            facts.append(Fact(_capitalised(sentence), question, answers, retold, false_value))
        stated, missing = facts[:STATED], facts[STATED:]
        opening = _capitalised(random.choice(kind["openings"]).format(subject=subject))
        sentences = [opening, *(fact.sentence for fact in stated)]
        for filler in random.sample(_TEMPLATES["fillers"], FILLERS):
            sentences.insert(random.randrange(1, len(sentences) + 1), filler)
        yield Passage(" ".join(sentences), tuple(stated), tuple(missing))


def _subject(template: str, random: Random) -> str:
    """A name from a template such as ``the {place} {house}``."""
    first_name, start = random.choice(_TEMPLATES["given"]), random.choice(_TEMPLATES["starts"])
    family = start + random.choice(_TEMPLATES["endings"])
    place = start + random.choice(_TEMPLATES["middles"]) + random.choice(_TEMPLATES["ends"])
    words = {name: random.choice(_TEMPLATES["words"][name]) for name in ("firm", "house")}
    return template.format(person=f"{first_name} {family}", family=family, town=place, place=place, **words)


def _value(fact: Mapping[str, Any], random: Random) -> tuple[str, ...]:
    """A value of a fact's kind (its name, or the lowest number and the end of a range), and other ways to write it."""
    kind, unit = fact["value"], fact.get("unit")
    if isinstance(kind, list):
        number = random.randrange(*kind)
        written = f"{number:,}"
        return tuple(dict.fromkeys((f"{written} {unit}" if unit else written, written, str(number))))
    if kind == "year":
        return (str(random.randrange(1702, 2019)),)
    if kind == "date":
        day, month, year = random.randrange(1, 29), random.choice(_TEMPLATES["months"]), random.randrange(1780, 2019)
        return (f"{day} {month} {year}", f"{month} {day} {year}")
    if kind == "count":
        number, word = random.choice([*_TEMPLATES["counts"].items()])
        return (word, number)
    if kind == "person":
        family = random.choice(_TEMPLATES["starts"]) + random.choice(_TEMPLATES["endings"])
        return (f"{random.choice(_TEMPLATES['given'])} {family}", family)
    if kind == "town":
        return (_subject("{town}", random),)
    value = random.choice(_TEMPLATES["words"][kind])
    bare = value.split(" ", 1)[1] if value.startswith(("a ", "an ")) else value
    return tuple(dict.fromkeys((value, bare)))


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


TOLD, FALSE, MISSING = 4, 0.2, 0.2
"""The number of facts in a retelling, and the share of them that are told with a false value, and that the passage does
not state."""


def planted_errors(count: int, seed: int = 0) -> list[LabelledText]:
    """Retellings of invented passages, one for each, whose false and unstated values are labelled."""
    random = Random(seed)
    records = []
    for number, passage in enumerate(itertools.islice(passages(seed), count)):
        missing = list(passage.missing)
        text, spans = "", list[LabelledSpan]()
        for fact in random.sample(passage.stated, TOLD):
            drawn = random.random()
            told, wrong = (missing.pop(), True) if drawn < MISSING else (fact, drawn < MISSING + FALSE)
            value = told.false_value if wrong and told is fact else told.answers[0]
            before, _, after = told.retold.partition("{value}")
            before, shown = (_capitalised(before), value) if before else ("", _capitalised(value))
            text += " " if text else ""
            start = len(text) + len(before)
            text += before + shown + after
            if wrong:
                spans.append(LabelledSpan(start, start + len(shown)))
        question = f"{passage.text}\n\nSummarise the text."
        prompt = f"{question}\nSummary:"
        group = f"planted {number}"
        records.append(LabelledText(str(number), prompt, text, question, None, tuple(spans), group))
    return records


TEXTS, ROUNDS, STEADY = 150, 6, 0.02
"""The most texts with planted errors if their number is not given, the most rounds that they are divided into, and the
change of the AUROC that ends them."""


def made_spans(
    engine: "CocoaEngine",
    count: int,
    config: CocoaConfig,
    *,
    rounds: int = 1,
    chat: bool = False,
    seed: int = 0,
    cache: CacheFolder | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of the spans of ``count`` texts with planted errors, which are fed to a model.

    They are divided into ``rounds``, of which as many are read as :func:`until_steady` takes. With ``chat``, they are
    fed through the model's chat template. ``cache`` has what was fed before. ``advance`` is called with the number of
    texts fed since its last call.
    """
    sets: list[LabelledFeatures] = []
    texts = planted_errors(count, seed)
    parts = [part for number in range(rounds) if (part := texts[number::rounds])]
    fed = force(engine, itertools.chain.from_iterable(parts), config, chat=chat, cache=cache, advance=advance)

    def measure(part: Sequence[LabelledText]) -> LabelledFeatures:
        of_part = itertools.islice(fed, len(part))
        sets.append(labelled_features(of_part, config, engine.num_layers)["span"])
        return replace(LabelledFeatures.pooled(sets), sets=None)

    return until_steady(parts, measure)


PartT = TypeVar("PartT")


def until_steady(parts: Sequence[PartT], measure: Callable[[PartT], LabelledFeatures]) -> LabelledFeatures:
    """The items of as many parts as it takes. ``measure`` measures one, and returns its items with those before.

    They are enough when there are prompts for a cross-validation in both classes, and the AUROC of its risks differs by
    at most :data:`STEADY` from that of the part before. After the last part, the AUROC decides nothing.
    """
    before = math.nan
    for part in parts[:-1]:
        items = measure(part)
        auroc = auroc_left_out(items)
        if abs(auroc - before) <= STEADY:
            return items
        before = auroc
    return measure(parts[-1])
