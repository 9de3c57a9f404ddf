"""The prompts: varied questions, questions about a passage, prompts of any length, and answers to score."""

from __future__ import annotations

import json
from pathlib import Path

from cocoa_engine import CocoaEngine

# The first eight are the single-stream prompts. Lengths and kinds differ, so that a batch of them is ragged.
QUESTIONS = (
    "What is the capital of Australia, and when was it founded?",
    "Explain why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Name five rivers in Europe and the countries they flow through.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey? Think step by step.",
    "Who discovered penicillin, and how did it come about?",
    "Summarise in one sentence: The town council met on Monday to discuss the old bridge. Engineers said that it would "
    "stand for five more years at most. Shopkeepers feared that closing it would cost them customers. The council put "
    "the decision off until the spring.",
    'Give me a JSON object with the keys "name", "age" and "hobbies" of a person you make up.',
    "Was ist die Hauptstadt von Österreich, und welcher Fluss fließt durch sie?",
    "Write the opening of a story about a lighthouse keeper who finds a letter.",
    "What are the rules of chess?",
    "Translate into French: The library opens at nine and closes at six.",
    "Is it true that we only use ten percent of our brain?",
    "Compare a bicycle and a car for a daily commute of five kilometres.",
    "Give me a recipe for pancakes.",
    "Which planet has the most moons?",
)

UNTUNED = Path(__file__).parent / "untuned_questions.jsonl"
"""Questions on which nothing was tuned, one a line. Choose no setting and no constant by them."""

# (passage, question): the answer is in the passage, often in its words
PASSAGES = (
    (
        "The Harrow Street library was built in 1911 by the architect Edith Malloy. It has a reading room of green "
        "tiles and a glass dome that was restored in 2004 after a storm. The library lends books for three weeks, and "
        "members of the town may borrow up to twelve books at a time. Its collection of sea charts is in the basement.",
        "Who built the Harrow Street library, when, and how many books may a member borrow at a time?",
    ),
    (
        "To descale the KT-40 kettle, fill it with half a litre of water and two tablespoons of citric acid. Bring the "
        "water to the boil, switch the kettle off and let it stand for twenty minutes. Pour the water away, rinse the "
        "kettle twice with cold water, and boil it once with fresh water before you use it again.",
        "Repeat the steps to descale the KT-40 kettle, in order.",
    ),
    (
        "def parse_line(line: str) -> tuple[str, float]:\n    name, _, amount = line.partition(':')\n    "
        "return name.strip(), float(amount)\n\n\ndef read_totals(path: str) -> dict[str, float]:\n    totals = {}\n    "
        "with open(path) as lines:\n        for line in lines:\n            name, amount = parse_line(line)\n"
        "            totals[name] = totals.get(name, 0.0) + amount\n    return totals\n",
        "Write the function read_totals again so that it skips empty lines. Keep the rest as it is.",
    ),
    (
        "Minutes, 4 March. Present: Amara Lindt, Joel Okafor, Petra Swann. Joel Okafor reported that the new pump was "
        "delivered on 27 February and is working. Petra Swann will order the spare filters by 11 March. Amara Lindt "
        "will write to the residents of Mill Lane about the roadworks. The next meeting is on 8 April.",
        "List who does what by when, according to the minutes.",
    ),
    (
        "The common swift spends nearly all of its life in the air. It eats, drinks and sleeps while flying, and lands "
        "only to breed. Swifts return to the same nest each year. A young swift that leaves its nest in July may stay "
        "in the air for two or three years before it lands for the first time.",
        "According to the text, how long may a young swift stay in the air, and when does it leave its nest?",
    ),
    (
        "Order 20931. Customer: Dana Whitfield. Items: 2 oak shelves at 45.00 each, 1 box of screws at 3.50, 1 spirit "
        "level at 12.90. Delivery: 8.00. Total: 114.40. To be delivered to 17 Canal Row, Tiverton, on Thursday between "
        "10 and 12 o'clock. The customer asks that the driver rings the upper bell.",
        "Write a short message to the customer that confirms the items, the total, and the delivery.",
    ),
    (
        "Copper is a soft metal with a high conductivity of heat and electricity. Freshly exposed copper has a reddish "
        "colour. Bronze is an alloy of copper and tin; brass is an alloy of copper and zinc. Copper has been used for "
        "about ten thousand years. On roofs it slowly turns green, because a layer of verdigris forms on it.",
        "What are bronze and brass, and why do copper roofs turn green? Quote the text.",
    ),
    (
        "Returns: Goods may be returned within 30 days of delivery if they are unused and in their original packaging. "
        "The customer pays for the return unless the goods are faulty. Refunds are made within 14 days to the account "
        "from which the goods were paid. Gift cards, opened software and goods made to measure cannot be returned.",
        "A customer wants to return opened software after 10 days. What do the rules say? Quote them.",
    ),
)

_CITIES = ("Lisbon", "Oslo", "Quito", "Nairobi", "Hanoi", "Perth", "Tallinn", "Lima", "Accra", "Kyoto", "Ghent")

SCORED_QUESTION = (
    "The following is a quiz about ships and harbours. The ferry Aurora left the harbour of a city in the morning with "
    "two hundred passengers, a cargo of oranges and one dog. The weather was fair until noon, when a wind rose from "
    "the west and the captain turned back. Which city was it, and how many passengers did the ferry carry?"
)
_ANSWERS = (
    "It was {city}, with {count} passengers on board.",
    "{city}; the ferry carried {count} passengers.",
    "The ferry left {city} with {count} passengers.",
    "{count} passengers, and the city was {city}.",
    "We are not told; perhaps {city}, and {count}.",
)
SCORED_ANSWERS = tuple(
    _ANSWERS[number % len(_ANSWERS)].format(city=_CITIES[number % len(_CITIES)], count=number * 7 % 300)
    for number in range(100)
)
"""A hundred different answers to :data:`SCORED_QUESTION`."""


def encode_question(engine: CocoaEngine, question: str) -> list[int]:
    """Token ids of a question: as a chat message if the model has a chat template, otherwise as plain text."""
    if engine.has_chat_template:
        return engine.encode_chat([{"role": "user", "content": question}])
    return engine.encode(question)


def questions(engine: CocoaEngine, count: int) -> list[list[int]]:
    """The first ``count`` questions as token ids."""
    return [encode_question(engine, question) for question in QUESTIONS[:count]]


def untuned_questions(engine: CocoaEngine, count: int) -> list[list[int]]:
    """The first ``count`` of 40 chat questions on which nothing was tuned, as token ids."""
    lines = UNTUNED.read_text(encoding="utf-8").splitlines()
    return [encode_question(engine, json.loads(line)) for line in lines[:count]]


def context_questions(engine: CocoaEngine, count: int) -> list[list[int]]:
    """The first ``count`` questions about a passage, each with its passage, as token ids."""
    return [encode_question(engine, f"{passage}\n\n{question}") for passage, question in PASSAGES[:count]]


LOG_BOOK_QUESTION = "What does a day at this lighthouse look like?"


def long_prompt(engine: CocoaEngine, length: int, question: str = LOG_BOOK_QUESTION) -> list[int]:
    """A prompt of exactly ``length`` tokens: a log book, truncated to fit, and a question with or without a passage."""
    whole = encode_question(engine, f"{_log_book(length // 20)}\n{question}")
    surplus = len(whole) - length
    tail = len(encode_question(engine, question))  # the question with the text of the chat template
    assert surplus >= 0, "the log book is too short"
    assert tail <= length, "the question does not fit"
    return whole[: len(whole) - tail - surplus] + whole[-tail:]


def long_context_questions(engine: CocoaEngine, length: int, count: int) -> list[list[int]]:
    """The first ``count`` questions about a passage, each preceded by a log book: prompts of ``length`` tokens."""
    return [long_prompt(engine, length, f"\n{passage}\n\n{question}") for passage, question in PASSAGES[:count]]


def _log_book(days: int) -> str:
    return "\n".join(
        f"Day {day}: at {6 + day % 5}:{day * 13 % 60:02d} the wind came from the "
        f"{('north', 'east', 'south', 'west')[day * day % 4]}, {day * 7 % 23} boats passed on their way to "
        f"{_CITIES[day * 5 % len(_CITIES)]}, and the lamp burnt {day * 11 % 40 + 3} litres of oil."
        for day in range(1, days + 1)
    )
