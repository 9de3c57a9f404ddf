"""Invented facts: passages that no model has read, and questions with and without an answer in them.

Subjects, names and numbers are drawn at random, so a model can only take an answer from the passage. A passage states
some facts about its subject and leaves others out. Questions about stated facts have an answer in the passage;
questions about the others have none. The templates are in ``invented.json``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_TEMPLATES = Path(__file__).with_suffix(".json")

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
