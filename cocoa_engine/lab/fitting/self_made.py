"""A labelled set that a model makes itself: questions with and without an answer in a passage, and its own answers.

The passages are invented, or are the user's documents with one term asked for. Answers are labelled by comparison with
the term. A question whose answer was taken out of the passage can only be answered right by declining. The comparison
does not label every span of an answer, so spans are labelled in retellings with planted errors instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab.answer_cache import AnswerCache
from cocoa_engine.lab.answering import answered
from cocoa_engine.lab.data import LabelledText, Question
from cocoa_engine.lab.fitting.fit import LabelledFeatures
from cocoa_engine.lab.fitting.measured import Rows, answer_values, labelled_features, request_prompt
from cocoa_engine.lab.fitting.planted import planted_errors
from cocoa_engine.lab.invented import passages
from cocoa_engine.lab.signal.segments import KnownAnswers, force
from cocoa_engine.risk.features import Level

if TYPE_CHECKING:
    from cocoa_engine.engine import CocoaEngine

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
class MadeQuestion:
    """A question about a passage.

    Attributes:
        request: the whole prompt.
        question: its known answers.
        answerable: whether the passage has the answer.
    """

    request: str
    question: Question
    answerable: bool

    def is_right(self, answer: str) -> bool:
        """Whether an answer is right: it has the known answer or, if the passage lacks it, declines."""
        return self.question.is_right(answer) or (not self.answerable and declines(answer))


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
            question = Question(fact.question, passage.text, fact.answers, f"invented {number}")
            yield MadeQuestion(_request(number, passage.text, fact.question), question, answerable)


def _of_documents(documents: Sequence[str], seed: int) -> Iterator[MadeQuestion]:
    """For each part of a document one term to complete, with the sentence that has it, and without."""
    random = Random(seed)
    parts = [part for text in documents for part in _parts(text)]
    random.shuffle(parts)
    for number, sentences in enumerate(parts):
        text = " ".join(sentences)
        known = [
            (at, found.group())
            for at, sentence in enumerate(sentences)
            for found in _TERM.finditer(sentence)
            if text.count(found.group()) == 1
        ]
        if not known or len(sentences) < 2:
            continue
        at, term = random.choice(known)
        cloze = sentences[at].replace(term, "____", 1)
        asked = f'Which name, date or number belongs in the gap? "{cloze}"'
        without = " ".join(sentence for number, sentence in enumerate(sentences) if number != at)
        for passage, answerable in ((text, True), (without, False)):
            question = Question(asked, passage, (term,), f"document {number}")
            yield MadeQuestion(_request(number, passage, asked), question, answerable)


def _parts(text: str) -> Iterator[list[str]]:
    """The sentences of a text, in parts of at most :data:`MAX_WORDS` words."""
    part: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        if part and sum(len(one.split()) for one in part) + len(sentence.split()) > MAX_WORDS:
            yield part
            part = []
        part.append(sentence)
    if part:
        yield part


def _request(number: int, passage: str, question: str) -> str:
    return REQUESTS[number % len(REQUESTS)].format(passage=passage, question=question)


def self_made_features(
    engine: CocoaEngine,
    made: Sequence[MadeQuestion],
    config: CocoaConfig,
    *,
    chat: bool = False,
    seed: int = 0,
    cache: AnswerCache | None = None,
    known: KnownAnswers | None = None,
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
    rows = Rows()
    prompts = [request_prompt(engine, one.request) for one in made]
    for one, values in answered(engine, made, prompts, config, answer_values, cache=cache, advance=advance):
        if values["features"] is not None:
            rows.add(values["features"], not one.is_right(values["text"]), one.question.group)
    texts = planted_errors(len(made) // 2, seed)
    fed = force(engine, feeding(texts), config, chat=chat, cache=known)
    found = labelled_features(fed, config, engine.num_layers)
    return {**found, "answer": rows.labelled("answer")} if rows.labels else found
