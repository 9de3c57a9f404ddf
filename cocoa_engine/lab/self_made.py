"""Questions and labelled texts that need no data set: invented passages, planted errors, terms of documents."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab.cache import AnswerCache
from cocoa_engine.lab.data import LabelledSpan, LabelledText, Question
from cocoa_engine.lab.fit import LabelledFeatures
from cocoa_engine.lab.forced import ProfileCache, force
from cocoa_engine.lab.measured import labelled_features, own_answers
from cocoa_engine.risk.features import Level

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

_TEMPLATES = Path(__file__).with_name("invented.json")

STATED = 5
"""The number of facts that a passage states. The others are left out."""

FILLERS = 2
"""The number of sentences without a fact in a passage."""


@dataclass(frozen=True)
class Fact:
    """A fact about a subject.

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
    retold: str = ""
    false_value: str = ""


@dataclass(frozen=True)
class Passage:
    """A passage about an invented subject.

    Attributes:
        text: the passage.
        stated: the facts that it states.
        missing: facts of the same subject that it does not state.
    """

    text: str
    stated: tuple[Fact, ...]
    missing: tuple[Fact, ...]


def passages(seed: int = 0) -> Iterator[Passage]:
    """Invented passages without end, the same for the same seed."""
    random, templates = Random(seed), _templates()
    while True:
        yield _passage(random, templates)


@functools.cache
def _templates() -> Mapping[str, Any]:
    templates: Mapping[str, Any] = json.loads(_TEMPLATES.read_text(encoding="utf-8"))
    return templates


def _passage(random: Random, templates: Mapping[str, Any]) -> Passage:
    kind = random.choice(templates["kinds"])
    subject = _subject(kind["subject"], random, templates)
    facts = []
    for template in random.sample(kind["facts"], len(kind["facts"])):
        answers = _value(template["value"], template.get("unit"), random, templates)
        sentence = random.choice(template["sentences"]).format(subject=subject, value=answers[0])
        question = template["question"].format(subject=subject)
        facts.append(Fact(_capitalised(sentence), question, answers, *_retold(template, subject, answers, templates)))
    stated, missing = facts[:STATED], facts[STATED:]
    opening = _capitalised(random.choice(kind["openings"]).format(subject=subject))
    sentences = [opening, *(fact.sentence for fact in stated)]
    for filler in random.sample(templates["fillers"], FILLERS):
        sentences.insert(random.randrange(1, len(sentences) + 1), filler)
    return Passage(" ".join(sentences), tuple(stated), tuple(missing))


def _subject(template: str, random: Random, templates: Mapping[str, Any]) -> str:
    """A name from a template such as ``the {place} {house}``."""
    given, start = random.choice(templates["given"]), random.choice(templates["starts"])
    family = start + random.choice(templates["endings"])
    place = start + random.choice(templates["middles"]) + random.choice(templates["ends"])
    words = {name: random.choice(templates["words"][name]) for name in ("firm", "house")}
    return template.format(person=f"{given} {family}", family=family, town=place, place=place, **words)


def _value(kind: str | list[int], unit: str | None, random: Random, templates: Mapping[str, Any]) -> tuple[str, ...]:
    """A value of a kind, and other ways to write it.

    Args:
        kind: the name of the kind, or the lowest number and the end of a range.
        unit: the unit of a number.
        random: draws the value.
        templates: the parts of names, and lists of words.
    """
    if isinstance(kind, list):
        number = random.randrange(*kind)
        written = f"{number:,}"
        return tuple(dict.fromkeys((f"{written} {unit}" if unit else written, written, str(number))))
    if kind == "year":
        return (str(random.randrange(1702, 2019)),)
    if kind == "date":
        day, month, year = random.randrange(1, 29), random.choice(templates["months"]), random.randrange(1780, 2019)
        return (f"{day} {month} {year}", f"{month} {day} {year}")
    if kind == "count":
        number, word = random.choice([*templates["counts"].items()])
        return (word, number)
    if kind == "person":
        family = random.choice(templates["starts"]) + random.choice(templates["endings"])
        return (f"{random.choice(templates['given'])} {family}", family)
    if kind == "town":
        return (_subject("{town}", random, templates),)
    value = random.choice(templates["words"][kind])
    bare = value.split(" ", 1)[1] if value.startswith(("a ", "an ")) else value
    return tuple(dict.fromkeys((value, bare)))


def _retold(
    template: Mapping[str, Any], subject: str, answers: tuple[str, ...], templates: Mapping[str, Any]
) -> tuple[str, str]:
    """Another sentence for a fact, and a false value. Drawing them does not change the passage."""
    random = Random(f"{subject} {answers[0]}")
    sentence = random.choice(template["sentences"]).format(subject=subject, value="{value}")
    while True:
        false = _value(template["value"], template.get("unit"), random, templates)[0]
        if false not in answers:
            return sentence, false


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


TOLD = 4
"""The number of facts in a retelling."""

FALSE, MISSING = 0.2, 0.2
"""The share of facts that are told with a false value, and of facts that the passage does not state."""


def planted_errors(count: int, seed: int = 0) -> list[LabelledText]:
    """Retellings of invented passages, one for each passage.

    Args:
        count: the number of retellings.
        seed: seed of the passages and of the errors.
    """
    random = Random(seed)
    records = []
    for number, passage in enumerate(islice(passages(seed), count)):
        text, spans = _with_errors(passage, random)
        question = f"{passage.text}\n\nSummarise the text."
        records.append(
            LabelledText(
                id=str(number),
                prompt=f"{question}\nSummary:",
                text=text,
                question=question,
                label=None,
                spans=tuple(spans),
                group=f"planted {number}",
                source=passage.text,
            )
        )
    return records


def _with_errors(passage: Passage, random: Random) -> tuple[str, list[LabelledSpan]]:
    """A retelling, and its hallucinated parts: false values, and values of facts that are not in the passage."""
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
    return text, spans


QUESTIONS = 300
"""The default number of questions."""

MAX_WORDS = 150
"""The length of a passage of a document, in words."""

REQUESTS = (
    "Passage: {passage}\n\nAnswer the question from the passage, in a few words.\nQuestion: {question}",
    "{passage}\n\n{question} Answer in one short sentence.",
    'Use this text: {passage}\n\nQuestion: {question}\nIf the text does not say, answer "The text does not say."',
)
"""The wordings of a request, in turn."""

_DECLINED = re.compile(
    r"(\b(not|never|no)|n't)\b[^.]*\b(say|says|state[sd]?|mention(s|ed)?|specif(y|ies|ied)|provide[sd]?|give[ns]?|known?|"
    r"information|contain(s|ed)?|answer|find|found|clear|sure|available)\b|\bunknown\b|\bcannot\b|\bunable\b",
    re.IGNORECASE,
)

_TERM = re.compile(
    r"(?<=[a-z,] )(?:[A-Z][a-z]+(?: [A-Z][a-z]+)+|\d{1,2} (?:January|February|March|April|May|June|July|August|"
    r"September|October|November|December) \d{4}|\d[\d,.]*\d|[A-Z][a-z]{3,})(?=[ ,.;])"
)
"""Names inside a sentence, dates and numbers of at least two digits."""


@dataclass(frozen=True)
class MadeQuestion(Question):
    """A question about a passage, which is its context.

    Attributes:
        answerable: whether the passage has the answer.
        wording: the number of the wording in :data:`REQUESTS`, from 0; after the last one it begins again.
    """

    answerable: bool = True
    wording: int = 0

    @property
    def request(self) -> str:
        """The whole prompt."""
        return REQUESTS[self.wording % len(REQUESTS)].format(passage=self.context, question=self.text)

    def is_right(self, answer: str) -> bool:
        """Whether an answer is right: it has the known answer or, if the passage lacks it, declines."""
        return super().is_right(answer) or (not self.answerable and declines(answer))


def declines(answer: str) -> bool:
    """Whether an answer says that the passage does not have the answer."""
    return bool(_DECLINED.search(answer))


def made_questions(documents: Sequence[str] = (), count: int = QUESTIONS, seed: int = 0) -> list[MadeQuestion]:
    """Questions about invented passages and, if there are documents, as many about these.

    A third of the questions about invented facts, and half of those about documents, have no answer in their passage.

    Args:
        documents: texts of the user.
        count: the number of questions.
        seed: seed of everything that is drawn.

    Raises:
        CalibrationError: the documents have no sentence with a name, date or number to ask for.
    """
    made = list(islice(_invented(seed), count if not documents else count - count // 2))
    if not documents:
        return made
    asked = list(islice(_of_documents(documents, seed), count // 2))
    if not asked:
        raise CalibrationError(
            "the documents have no sentence with a name, a date or a number to ask for; leave them out, or give others."
        )
    return made + asked


def _invented(seed: int) -> Iterator[MadeQuestion]:
    for number, passage in enumerate(passages(seed)):
        for fact, answerable in ((passage.stated[0], True), (passage.stated[1], True), (passage.missing[0], False)):
            group = f"invented {number}"
            yield MadeQuestion(fact.question, passage.text, fact.answers, group, answerable, number)


def _of_documents(documents: Sequence[str], seed: int) -> Iterator[MadeQuestion]:
    """For each part of a document one term to complete, with the sentence that has it, and without."""
    random = Random(seed)
    parts = [part for text in documents for part in _parts(text)]
    random.shuffle(parts)
    for number, sentences in enumerate(parts):
        text = " ".join(sentences)
        terms = [(at, match.group()) for at, sentence in enumerate(sentences) for match in _TERM.finditer(sentence)]
        known = [(at, term) for at, term in terms if text.count(term) == 1]
        if not known or len(sentences) < 2:
            continue
        at, term = random.choice(known)
        cloze = sentences[at].replace(term, "____", 1)
        asked = f'Which name, date or number belongs in the gap? "{cloze}"'
        without = " ".join(sentence for number, sentence in enumerate(sentences) if number != at)
        for passage, answerable in ((text, True), (without, False)):
            yield MadeQuestion(asked, passage, (term,), f"document {number}", answerable, number)


def _parts(text: str) -> Iterator[list[str]]:
    """The sentences of a text, in parts of at most :data:`MAX_WORDS` words."""
    part: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        if part and len(" ".join([*part, sentence]).split()) > MAX_WORDS:
            yield part
            part = []
        part.append(sentence)
    if part:
        yield part


def self_made_features(
    engine: CocoaEngine,
    made: Sequence[MadeQuestion],
    config: CocoaConfig,
    *,
    chat: bool = False,
    seed: int = 0,
    cache: AnswerCache | None = None,
    known: ProfileCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
    feeding: Callable[[Sequence[LabelledText]], Iterable[LabelledText]] = iter,
) -> dict[Level, LabelledFeatures]:
    """The features and labels of a model's answers to made questions, and of the spans of texts with planted errors.

    Args:
        engine: the engine with the model.
        made: the questions. There are half as many texts with planted errors.
        config: the settings of the decodes.
        chat: feed the texts through the model's chat template. Questions always use it if there is one.
        seed: seed of the texts.
        cache: answers to questions that were asked before.
        known: texts that were fed before.
        advance: called with the number of questions answered since the last call.
        feeding: yields the texts with planted errors, to show progress.
    """
    found: dict[Level, LabelledFeatures] = {}
    with suppress(CalibrationError):  # all answers are empty
        found["answer"] = own_answers(engine, made, config, cache=cache, advance=advance)
    texts = planted_errors(len(made) // 2, seed)
    fed = force(engine, feeding(texts), config, chat=chat, cache=known)
    return {**labelled_features(fed, config, engine.num_layers), **found}
