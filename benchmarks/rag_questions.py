"""How often a model answers from a passage what stands there, and says so where the passage does not say.

A set of questions is made by rule of Natural Questions with passages and of license texts: of each passage a question
that it answers, one that it does not answer, and one that presupposes what the passage contradicts.

    python -m benchmarks.rag_questions make --nq nq-open-oracle.jsonl.gz --licenses /usr/share/common-licenses
    python -m benchmarks.rag_questions ask --model model.gguf --out answers.jsonl

``ask`` prints a table of right answers; the answers are kept in ``--out``. The texts are not part of the project.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markdown import Markdown
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

from cocoa_engine import CocoaEngine
from cocoa_engine.lab.files import RowModel, parsed, read_document, read_json_lines
from cocoa_engine.text_matching import contains, declines
from cocoa_integrations.langchain import ChatCocoa, get_risk, max_risk

Kind = Literal["answerable", "unanswerable", "false_premise"]
KINDS: tuple[Kind, ...] = ("answerable", "unanswerable", "false_premise")
METHODS = ("greedy", "cocoa-sig")
LICENSES = ("Apache-2.0", "Artistic", "GFDL-1.3", "GPL-3", "LGPL-2.1", "LGPL-3", "MPL-1.1", "MPL-2.0")
PASSAGES = 100
FEW = ("number", "term")
"""Types of answers of which there are few: all are taken."""
WORDS = (40, 160)  # of a passage
ON_TOPIC, SAME_QUESTION = 0.2, 0.6
"""The least cosine similarity of the passages, and the greatest of the questions, for a question of another passage."""

EXCLUDED = frozenset(
    [
        f"nq {line}"
        for line in (36, 119, 213, 270, 412, 418, 527, 695, 778, 793, 1084, 1180, 1300, 1385, 1531, 1540, 1721, 1726)
    ]
    + [f"nq {line}" for line in (1917, 1944, 2103, 2190, 2415)]
    + ["MPL-2.0 465"]
)
"""Left out after reading: broken grammar, a wrong label, or another passage that does answer the question."""

SYSTEM = (
    "Answer in one short sentence, from the context only. If the context does not answer the question, reply: The "
    "context does not say."
)
USER = "Context:\n{passage}\n\nQuestion: {question}"

_YEAR = r"(?:1\d|20)\d\d"
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
TYPES = {
    "year": _YEAR,
    "day": rf"{_MONTH} \d\d?, {_YEAR}",
    "month": rf"{_MONTH} {_YEAR}",
    "number": r"[1-9]\d{0,2}",
    "name": r"[A-Z][\w.'’-]+(?: (?:[A-Z][\w.'’-]*|of|the|de|van|von))*(?<! of)",
}
"""Short answers by their form. Another one of the same type takes their place in a false premise."""

_AUXILIARY = "(is|was|are|were|does|do|did|will)"
_REST = (
    r"((?!.*\b(?:time|and (?:what|when|where|how))\b).*"
    r"(?<! (?:by|to|of|in|on|at|as))(?<! (?:for|and))(?<! (?:with|from)))"
)
PREMISES = (
    (rf"who (is|was) (?=the|a|an){_REST}", "name", r"Why \1 {} \2?"),
    (rf"who (plays|sings) {_REST}", "name", r"Why is it {} who \1 \2?"),
    (rf"who (played|sang|won|wrote) {_REST}", "name", r"Why was it {} who \1 \2?"),
    (rf"where {_AUXILIARY} (?!.* in ){_REST}", "name", r"Why \1 \2 in {}?"),
    (rf"when {_AUXILIARY} {_REST}", "day", r"Why \1 \2 on {}?"),
    (rf"(?:when|(?:in )?(?:what|which) year) {_AUXILIARY} {_REST}", "year month", r"Why \1 \2 in {}?"),
    (r"how many (.+) (are|were) there( in .*)?", "number", r"Why \2 there {} \1\3?"),
    (r"how many (.+?) (are|were) (in .*)", "number", r"Why \2 there {} \1 \3?"),
    (r"how many (.+?) (does|do|did) (.+) have( .*)?", "number", r"Why \2 \3 have {} \1\4?"),
)
"""Form of a question, the types of its answer, and the question that presupposes an answer."""

SAME_VERB = {"plays": "played", "sings": "sang"}
BORROWED = re.compile(r"(?:Who|When|Where|What|Which|How) (?!.*\b(?:this|last|next) (?:year|season|week)\b)")
"""Questions that are asked about the passages of others: what is relative to the present may be answered there."""


class RagQuestion(RowModel):
    """A question about a passage.

    Attributes:
        answers: accepted answers; of a false premise, those that the passage gives instead; empty if it gives none.
        premise: what a false premise has in the place of the answer.
        source: where the passage, and the question of another passage, come from.
    """

    id: str
    kind: Kind
    source: str
    passage: str
    question: str
    answers: list[str]
    premise: str | None = None


@dataclass(frozen=True)
class Fact:
    """A question that its passage answers. ``why`` has a gap for an answer that it presupposes; ``None``: no rule."""

    source: str
    passage: str
    question: str
    answers: tuple[str, ...]
    type: str | None = None
    why: str | None = None


class _Passage(RowModel):
    title: str
    text: str


class _NqRow(RowModel):
    question: str
    answers: list[str]
    ctxs: list[_Passage]


def natural_questions(path: Path) -> Iterator[Fact]:
    """The questions of NQ whose passage has an accepted answer and the wanted length."""
    for number, (where, value) in enumerate(read_json_lines(path)):
        row = parsed(_NqRow, value, where)
        passage = "\n".join(" ".join(text.split()) for text in (row.ctxs[0].title, row.ctxs[0].text))
        answers = tuple(dict.fromkeys(" ".join(answer.split()) for answer in row.answers))
        asked = " ".join(re.findall(r"[^\s\u200b]+", row.question)).rstrip(" ?")
        if not WORDS[0] <= len(passage.split()) <= WORDS[1] or len(asked.split()) < 5:
            continue
        if not contains(passage, answers[:1]) or contains(asked, answers):
            continue
        type_ = next((name for name, form in TYPES.items() if re.fullmatch(form, answers[0])), None)
        why = None
        for form, types, premise in PREMISES:
            match = re.fullmatch(form, asked)
            if match and type_ in types.split():
                why = match.expand(premise).replace(" ?", "?")
                if type_ == "name":
                    first, second = asked.split()[:2]
                    type_ = first if first == "where" else SAME_VERB.get(second, second)
                break
        yield Fact(f"nq {number}", passage, asked[0].upper() + asked[1:] + "?", answers, type_, why)


_DEFINITION = re.compile(
    r'(?:The |A |An |To )?"(?P<term>[A-Z][\w -]{3,})"'
    r'(?: (?:copy|form|for|of|as|below|\(or)[^".]{0,60}?| \(or "[^"]+"\))?,? '
    r"(?:means|shall mean|refers to|is|are) (?P<definition>(?!that |\()[^.;:]{25,260})[.;](?= |$)"
)


def license_terms(folder: Path, seed: int) -> Iterator[Fact]:
    """A question of each two definitions in a license or more, of at least 30 words: which term has this definition?"""
    for name in LICENSES:
        text = " ".join(read_document(folder / name).split())
        part: list[re.Match[str]] = []
        for match in _DEFINITION.finditer(text):
            part.append(match)
            passage = " ".join(definition.group() for definition in part)
            if len(part) > 1 and len(passage.split()) >= 30:
                candidates = [match for match in part if not contains(match["definition"], [match["term"]])]
                if candidates:
                    asked = Random(f"{seed} {name} {part[0].start()}").choice(candidates)
                    definition = asked["definition"]
                    yield Fact(
                        f"{name} {asked.start()}",
                        f"Definitions of {name}\n{passage}",
                        f'Which term does the license define as "{definition}"?',
                        (asked["term"],),
                        "term",
                        f'Why does the license use the term "{{}}" for "{definition}"?',
                    )
                part = []


def make(facts: Sequence[Fact], seed: int) -> list[RagQuestion]:
    """Questions of each kind about the passages of facts that have a rule for a false premise."""
    facts = [fact for fact in facts if fact.source not in EXCLUDED]
    topics = _similarity([f"{fact.question} {fact.passage}" for fact in facts])
    wordings = _similarity([f"{_title(fact)} {fact.question}" for fact in facts])
    drawn = [Random(f"{seed} {fact.source}").random() for fact in facts]  # independent of what else is left out
    order = sorted(range(len(facts)), key=lambda at: (facts[at].type not in FEW, drawn[at]))
    groups: list[list[tuple[Kind, str, str, str, Sequence[str], str | None]]] = []
    asked: set[int] = set()
    titles: set[str] = set()
    for at in order:
        fact, is_term = facts[at], facts[at].type == "term"
        if len(groups) == PASSAGES:
            break
        if fact.why is None or (_title(fact) in titles and not is_term):
            continue
        near = [int(other) for other in np.argsort(-topics[at], kind="stable") if facts[other].source != fact.source]
        other = next(
            (
                other
                for other in near
                if other not in asked
                and topics[at, other] >= ON_TOPIC
                and (is_term or wordings[at, other] <= SAME_QUESTION)
                and is_term == (facts[other].type == "term")
                and BORROWED.match(facts[other].question)
                and not contains(fact.passage, facts[other].answers)
                and not any(contains(answer, fact.answers) for answer in facts[other].answers)
            ),
            None,
        )
        swap = next(
            (
                facts[other].answers[0]
                for other in near
                if facts[other].type == fact.type and facts[other].why and _fits(facts[other].answers[0], fact)
            ),
            None,
        )
        if other is None or swap is None:
            continue
        asked.add(other)
        titles.add(_title(fact))
        borrowed = facts[other]
        groups.append(
            [
                ("answerable", fact.source, fact.passage, fact.question, fact.answers, None),
                ("unanswerable", f"{fact.source}, {borrowed.source}", fact.passage, borrowed.question, (), None),
                ("false_premise", fact.source, fact.passage, fact.why.format(swap), fact.answers, swap),
            ]
        )
    groups.sort(key=lambda group: Random(f"order {seed} {group[0][1]}").random())
    return [
        RagQuestion(
            id=f"{number}-{kind}",
            kind=kind,
            source=source,
            passage=passage,
            question=question,
            answers=list(answers),
            premise=premise,
        )
        for number, group in enumerate(groups)
        for kind, source, passage, question, answers, premise in group
    ]


def _fits(premise: str, fact: Fact) -> bool:
    """Whether a false answer is plausible, and is in neither the passage nor the question nor an accepted answer."""
    if fact.type in ("year", "month", "day") and not 1 < abs(int(premise[-4:]) - int(fact.answers[0][-4:])) < 12:
        return False
    if fact.type == "number" and not 1 / 3 < int(premise) / int(fact.answers[0]) < 3:
        return False
    texts = (fact.passage, fact.question, *fact.answers)
    return not any(contains(text, [premise]) for text in texts) and not contains(premise, fact.answers)


def _title(fact: Fact) -> str:
    return fact.passage.split("\n")[0]


def _similarity(texts: Sequence[str]) -> NDArray[np.float64]:
    weights = TfidfVectorizer(stop_words="english", sublinear_tf=True).fit_transform(texts)
    similarities: NDArray[np.float64] = (weights @ weights.T).toarray()
    return similarities


_DENIED = re.compile(
    r"\b(?:(?:is|was|are|were|does|do|did|has|have|had) not|\w+n't)\b(?! (?:only|just))|\b(?:incorrect|false|wrong)\b",
    re.IGNORECASE,
)


def is_right(answer: str, item: RagQuestion) -> bool:
    """Whether an answer is right, by rule.

    An answerable question needs an accepted answer. To the others it is right to decline. To a false premise it is also
    right to deny it, or to say what the passage has instead of it without a reason for it.
    """
    declined, named = declines(answer), contains(answer, item.answers)
    if item.kind == "answerable":
        return named and not declined
    if item.premise is None:
        return declined
    if contains(answer, [item.premise]):
        return declined or bool(_DENIED.search(answer))
    return declined or (named and "because" not in answer.lower())


def answered(engine: CocoaEngine, method: str, item: RagQuestion) -> dict[str, Any]:
    """The text of an answer, its risk as a whole, and that of its riskiest span."""
    chat = ChatCocoa(engine=engine, method=method, max_tokens=64)
    message = chat.invoke(messages(item))
    return {"text": message.text, "answer_risk": get_risk(message).answer_risk, "max_risk": max_risk(message)}


def messages(item: RagQuestion) -> list[tuple[str, str]]:
    """The messages of the chain in docs/tutorials/langchain-rag.md, with a sentence to say if there is no answer."""
    return [("system", SYSTEM), ("human", USER.format(passage=item.passage, question=item.question))]


def main() -> None:
    """Make the set, or answer the questions that the file of answers lacks and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rag_questions", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the set")
    making.add_argument("--nq", type=Path, required=True, help="NQ with passages: question, answers, ctxs")
    making.add_argument("--licenses", type=Path, default=Path("/usr/share/common-licenses"), help="folder of texts")
    making.add_argument("--seed", type=int, default=0)
    asking = commands.add_parser("ask", help="answer it")
    asking.add_argument("--model", help="Hub name, folder or file; default: the embedded model")
    asking.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    asking.add_argument("--passages", type=int, default=PASSAGES, help="the first of the set")
    asking.add_argument("--threads", type=int, default=2)
    asking.add_argument("--out", type=Path, default=Path("rag_answers.jsonl"), help="answers; continued if it exists")
    for command in (making, asking):
        command.add_argument("--set", type=Path, default=Path("rag_questions.jsonl"), help="the questions")
    options = parser.parse_args()
    if options.command == "make":
        facts = [*natural_questions(options.nq), *license_terms(options.licenses, options.seed)]
        lines = (item.model_dump_json() + "\n" for item in make(facts, options.seed))
        options.set.write_text("".join(lines), encoding="utf-8")
        return
    torch.set_num_threads(options.threads)
    items = [parsed(RagQuestion, value, where) for where, value in read_json_lines(options.set)]
    items = items[: len(KINDS) * options.passages]
    done = [value for _, value in read_json_lines(options.out)] if options.out.exists() else []
    engine: CocoaEngine | None = None
    complete = {(answer["method"], answer["id"]) for answer in done}
    for method, item in product(options.methods, items):
        if (method, item.id) in complete:
            continue
        engine = engine or CocoaEngine.from_pretrained(options.model)
        done.append({"method": method, "id": item.id, **answered(engine, method, item)})
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
    console, text = Console(), "\n".join(table(done, {item.id: item for item in items}))
    console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal, markup=False)


def table(answers: Sequence[Mapping[str, Any]], items: Mapping[str, RagQuestion]) -> Iterator[str]:
    """A row for each method, in Markdown: right answers by kind, and how well risks find the wrong ones."""
    yield f"| method | {' | '.join(KINDS)} | AUROC of answer_risk | of max_risk |"
    yield "| --- " * (len(KINDS) + 3) + "|"
    for method in METHODS:
        rows = [row for row in answers if row["method"] == method and row["id"] in items]
        if not rows:
            continue
        wrong = [not is_right(row["text"], items[row["id"]]) for row in rows]
        shares = []
        for kind in KINDS:
            faults = [fault for fault, row in zip(wrong, rows, strict=True) if items[row["id"]].kind == kind]
            shares.append(f"{len(faults) - sum(faults)} of {len(faults)}")
        areas = []
        for risk in ("answer_risk", "max_risk"):  # the first needs a calibrator
            values = [row[risk] for row in rows]
            is_ranked = 0 < sum(wrong) < len(wrong) and None not in values
            areas.append(f"{roc_auc_score(wrong, values):.2f}" if is_ranked else "–")
        yield f"| {method} | {' | '.join(shares + areas)} |"


if __name__ == "__main__":
    main()
