"""Questions and labelled texts that need no data set: invented passages, planted errors, terms of documents."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab.cache import AnswerCache, CacheFolder, answered
from cocoa_engine.lab.data import LabelledSpan, LabelledText, Question
from cocoa_engine.lab.fit import LabelledFeatures, auroc_left_out
from cocoa_engine.lab.measured import (
    answer_values,
    force,
    labelled_answers,
    labelled_features,
    mean_state,
    question_config,
    question_prompt,
)
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.text_matching import declines

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


QUESTIONS, MAX_WORDS = 300, 150
"""The most questions if their number is not given, and the length of a passage of a document, in words."""

REQUESTS = (
    "Passage: {passage}\n\nAnswer the question from the passage, in a few words.\nQuestion: {question}",
    "{passage}\n\n{question} Answer in one short sentence.",
    'Use this text: {passage}\n\nQuestion: {question}\nIf the text does not say, answer "The text does not say."',
)
"""The wordings of a request, in turn."""

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
        return REQUESTS[self.wording % len(REQUESTS)].format(passage=self.context, question=self.text)

    def is_right(self, answer: str) -> bool:
        """Whether an answer has the known answer or, if the passage lacks it, says so."""
        return super().is_right(answer) or (not self.answerable and declines(answer))


def made_questions(documents: Sequence[str] = (), count: int = QUESTIONS, seed: int = 0) -> list[MadeQuestion]:
    """Questions about invented passages and, if there are documents, as many about these.

    A third of the questions about invented facts, and half of those about documents, have no answer in their passage.

    Raises:
        CalibrationError: the documents have no sentence with a name, date or number to ask for.
    """
    invented = (
        MadeQuestion(fact.question, passage.text, fact.answers, f"invented {number}", fact in passage.stated, number)
        for number, passage in enumerate(passages(seed))
        for fact in (*passage.stated[:2], passage.missing[0])
    )
    made = list(itertools.islice(invented, count - count // 2 if documents else count))
    if not documents:
        return made
    asked = list(itertools.islice(_of_documents(documents, seed), count // 2))
    if not asked:
        raise CalibrationError(
            "the documents have no sentence with a name, a date or a number to ask for; leave them out, or give others."
        )
    return made + asked


def _of_documents(documents: Sequence[str], seed: int) -> Iterator[MadeQuestion]:
    """For each part of a document one term to complete, with the sentence that has it, and without."""
    random = Random(seed)
    parts: list[list[str]] = []  # sentences of at most MAX_WORDS words together
    for document in documents:
        parts.append([])
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(document.split())):
            if parts[-1] and len(" ".join([*parts[-1], sentence]).split()) > MAX_WORDS:
                parts.append([])
            parts[-1].append(sentence)
    random.shuffle(parts)
    for number, sentences in enumerate(parts):
        text = " ".join(sentences)
        terms = [(at, match.group()) for at, sentence in enumerate(sentences) for match in _TERM.finditer(sentence)]
        unique = [(at, term) for at, term in terms if text.count(term) == 1]
        if not unique or len(sentences) < 2:
            continue
        at, term = random.choice(unique)
        cloze = sentences[at].replace(term, "____", 1)
        asked = f'Which name, date or number belongs in the gap? "{cloze}"'
        without = " ".join(sentences[:at] + sentences[at + 1 :])
        for passage, answerable in ((text, True), (without, False)):
            yield MadeQuestion(asked, passage, (term,), f"document {number}", answerable, number)


ROUNDS, STEADY = 6, 0.02
"""The most rounds that questions and texts are divided into, and the change of the AUROC that ends them."""

RecordT = TypeVar("RecordT", Question, LabelledText)


def own_answers(
    engine: "CocoaEngine",
    questions: Sequence[Question],
    config: CocoaConfig,
    *,
    rounds: int = 1,
    layer: int | None = None,
    cache: AnswerCache | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> LabelledFeatures:
    """The features of a model's own answers to questions, of as many ``rounds`` as :func:`until_steady` takes.

    With a ``layer``, each answer is fed again after its prompt, and its mean state is measured, for a probe.
    ``cache`` has what was asked before. ``advance`` is called with the number of questions answered since its last
    call.

    Raises:
        CalibrationError: all answers are empty.
    """
    rows: list[tuple[Question, Mapping[str, Any]]] = []
    config = question_config(engine, config)
    profiler = None if layer is None else Profiler(engine.session, config, (), layer)

    def measure(part: Sequence[Question]) -> LabelledFeatures:
        prompts = [question_prompt(engine, question.request) for question in part]
        answers = answered(engine, part, prompts, config, answer_values, cache=cache, advance=advance)
        for prompt, (question, values) in zip(prompts, answers, strict=True):
            rows.append((question, values if profiler is None else {**values, **mean_state(profiler, prompt, values)}))
        return labelled_answers(rows)

    return until_steady(_divided(questions, rounds), measure)


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
    """The features of the spans of ``count`` texts with planted errors, fed to a model; as :func:`own_answers`.

    ``chat``: they are fed through the model's chat template.
    """
    sets: list[LabelledFeatures] = []
    parts = _divided(planted_errors(count, seed), rounds)
    fed = force(engine, itertools.chain.from_iterable(parts), config, chat=chat, cache=cache, advance=advance)

    def measure(part: Sequence[LabelledText]) -> LabelledFeatures:
        of_part = itertools.islice(fed, len(part))
        sets.append(labelled_features(of_part, config, engine.num_layers)["span"])
        return replace(LabelledFeatures.pooled(sets), sets=None)

    return until_steady(parts, measure)


def _divided(made: Sequence[RecordT], rounds: int) -> list[list[RecordT]]:
    """Every ``rounds``-th group in each round, so that rounds are alike."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(record.group for record in made))}
    parts = [[record for record in made if numbers[record.group] % rounds == number] for number in range(rounds)]
    return [part for part in parts if part]


def until_steady(
    parts: Sequence[Sequence[RecordT]], measure: Callable[[Sequence[RecordT]], LabelledFeatures]
) -> LabelledFeatures:
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
