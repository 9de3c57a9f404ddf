"""How well scores of one pass rank a model's own wrong answers, and whether a fit on other models' answers does better.

    python -m benchmarks.own_answers ask --model model.gguf --name "Qwen 0.5B" --nq nq.jsonl --rag rag.jsonl
    python -m benchmarks.own_answers table
    python -m benchmarks.own_answers gate
    python -m benchmarks.own_answers right --named "Qwen2.5-Coder of 0.5B and 1.5B"
    python -m benchmarks.own_answers fit --model model.gguf --rag rag.jsonl

``ask`` answers questions with known answers, adds the scores of each answer to a CSV file, and continues where it
stopped. The sets are the short questions of this folder, invented passages, and those whose files are given. ``gate``
prints what a gate at the default threshold of the rank lets pass and stops. ``right`` prints the distribution of the
surprisal of models' right answers, among which answers of other models are ranked.
``fit`` answers the questions of the given sets, fits a risk on the answers as `cocoa calibrate` does, without and with
`--probe`, and prints how it ranks answers that were left out of the fit.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from rich.console import Console
from rich.markdown import Markdown
from sklearn.metrics import roc_auc_score

from benchmarks.rag_questions import RagQuestion, is_right, messages
from cocoa_engine import CocoaEngine, Generation
from cocoa_engine.equations import ANSWER_TOKENS, distribution
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.cache import answered
from cocoa_engine.lab.data import Question, read_questions
from cocoa_engine.lab.files import parsed, read_json_lines
from cocoa_engine.lab.fit import LabelledFeatures, fit_only, left_out
from cocoa_engine.lab.measured import (
    answer_values,
    labelled_answers,
    mean_state,
    probe_layers,
    question_config,
    question_prompt,
)
from cocoa_engine.lab.self_made import Fact, passages
from cocoa_engine.lab.statistics import expected_calibration_error, reliability
from cocoa_engine.methods.retrieval_heads import RightAnswers
from cocoa_engine.model.prompts import Prompt
from cocoa_engine.risk.policy import ANSWER_THRESHOLD
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.text_matching import contains, declines
from cocoa_integrations.evaluation.metrics import rouge_l
from cocoa_integrations.evaluation.tasks import load_samples

ANSWERS = Path(__file__).parent / "results" / "own_answers.csv"
OWN = ANSWERS.with_name("own_right_answers.json")
"""The right answers that `cocoa heads` found for each model."""

SHORT = Path(__file__).with_name("short_questions.jsonl")
SEED = 3
Floats = NDArray[np.float64]


class Asked(NamedTuple):
    """A question, its messages, and whether an answer to it is right. Questions of a group share their passage."""

    id: str
    group: str
    messages: list[dict[str, str]]
    is_right: Callable[[str], bool]


def short_questions(path: Path, limit: int) -> Iterator[Asked]:
    """Questions that are asked as they are."""
    questions = list(read_questions(path))
    Random(SEED).shuffle(questions)
    for number, question in enumerate(questions[:limit]):
        yield Asked(f"{number}", f"{number}", _user(question.text), question.is_right)


REQUESTS = (
    "Passage: {passage}\n\nAnswer the question from the passage, in a few words.\nQuestion: {question}",
    "{passage}\n\n{question} Answer in one short sentence.",
    'Use this text: {passage}\n\nQuestion: {question}\nIf the text does not say, answer "The text does not say."',
)
"""The wordings of a request about an invented passage, in turn."""


def invented(_: Path, limit: int) -> Iterator[Asked]:
    """Questions about invented passages, a third of which have no answer."""
    asked = (
        (f"invented {number}", REQUESTS[number % len(REQUESTS)], passage, fact)
        for number, passage in enumerate(passages(seed=7))
        for fact in (*passage.stated[:2], passage.missing[0])
    )
    for number, (group, wording, passage, fact) in enumerate(islice(asked, limit)):

        def right(answer: str, fact: Fact = fact, missing: bool = fact in passage.missing) -> bool:
            return contains(answer, fact.answers) or (missing and declines(answer))

        request = wording.format(passage=passage.text, question=fact.question)
        yield Asked(f"{number}", group, _user(request), right)


def natural_questions(path: Path, limit: int, task: str = "nq") -> Iterator[Asked]:
    """Questions of NQ or NQ-Swap with their passage."""
    for item in load_samples(task, path, limit=limit, shuffle=SEED):
        question = Question(item.question, item.context, tuple(item.references), item.id)
        yield Asked(item.id, item.id, _user(question.request), question.is_right)


def swapped(path: Path, limit: int) -> Iterator[Asked]:
    """NQ-Swap."""
    return natural_questions(path, limit, "nq_swap")


def truthfulqa(path: Path, limit: int) -> Iterator[Asked]:
    """Right is what is as close to a true as to a false answer by ROUGE-L, or closer. That is often mistaken."""
    for item in load_samples("truthfulqa_gen", path, limit=limit, shuffle=SEED):

        def right(answer: str, item: Any = item) -> bool:
            return rouge_l(answer, item.references) >= rouge_l(answer, item.incorrect)

        yield Asked(item.id, item.id, _user(item.question), right)


def rag(path: Path, limit: int) -> Iterator[Asked]:
    """The questions of ``benchmarks.rag_questions``."""
    for where, value in islice(read_json_lines(path), limit):
        item = parsed(RagQuestion, value, where)

        def right(answer: str, item: RagQuestion = item) -> bool:
            return is_right(answer, item)

        roles = {"human": "user"}
        chat = [{"role": roles.get(role, role), "content": text} for role, text in messages(item)]
        yield Asked(item.id, item.id.partition("-")[0], chat, right)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


SETS: dict[str, Callable[[Path, int], Iterator[Asked]]] = {
    "short": short_questions,
    "invented": invented,
    "nq": natural_questions,
    "nq_swap": swapped,
    "rag": rag,
    "truthfulqa": truthfulqa,
}
GIVEN = ("nq", "nq_swap", "rag", "truthfulqa")
"""The sets whose files are not part of the project."""

NOT_FITTED = "truthfulqa"
"""Reported only, because its labels are often wrong."""


def prompt_of(engine: CocoaEngine, messages: Sequence[Mapping[str, str]]) -> Prompt:
    """The messages as a chat. A model without a chat template reads their texts after two examples."""
    if engine.has_chat_template:
        return engine.encode_chat(messages)
    return question_prompt(engine, "\n\n".join(message["content"] for message in messages))


def scores(answer: Generation) -> dict[str, float]:
    """Scores that are high where an answer is likely wrong; NaN where source attention was not measured."""
    log_probs, entropies, margins, copied, attention = (
        list(chain.from_iterable(getattr(span, f"token_{name}") for span in answer.spans))
        for name in ("log_probs", "entropies", "margins", "copied", "source_attention")
    )
    count = len(log_probs)
    return {
        "-log p": -sum(log_probs),
        "-mean log p": -sum(log_probs) / count,
        "-min log p": -min(log_probs),
        "-log p, first token": -log_probs[0],
        "mean entropy": sum(entropies) / count,
        "highest entropy": max(entropies),
        "-mean margin": -sum(min(margin, 20.0) for margin in margins) / count,
        "riskiest claim": max((claim.risk or 0.0 for claim in answer.claims), default=0.0),
        "fMLDS": max(span.f_mlds for span in answer.spans),
        "ConMLDS": max(span.con_mlds for span in answer.spans),
        "not in the prompt": sum(run == 0 for run in copied) / count,
        "-source attention": -sum(attention) / count if attention else math.nan,
    }


def ask(options: argparse.Namespace) -> None:
    """Append what is missing of a model's answers to the file, in batches. Empty answers have no scores."""
    torch.set_num_threads(options.threads)
    engine = CocoaEngine.from_pretrained(options.model)
    name = options.name or engine.model_name
    config = question_config(engine, engine.config.replace(max_new_tokens=64))
    done = {(row["model"], row["set"], row["id"]) for row in read(options.answers)}
    for kind, questions in SETS.items():
        path = getattr(options, kind) if kind in GIVEN else SHORT
        items = [] if path is None else list(questions(path, options.limit))
        missing = [item for item in items if (name, kind, item.id) not in done]
        for start in range(0, len(missing), options.batch):
            batch = missing[start : start + options.batch]
            prompts = [prompt_of(engine, item.messages) for item in batch]
            answers = engine.generate_batch(prompts, config=config)
            rows = [row_of(name, kind, *pair) for pair in zip(batch, answers, strict=True) if pair[1].spans]
            write(options.answers, rows)


def row_of(model: str, kind: str, asked: Asked, answer: Generation) -> dict[str, Any]:
    """The plain values of an answer."""
    return {
        "model": model,
        "set": kind,
        "id": asked.id,
        "group": asked.group,
        "wrong": int(not asked.is_right(answer.text)),
        "closed_book": int(answer.closed_book),
        **{name: f"{value:.4g}" for name, value in scores(answer).items()},
    }


DIVISIONS, FOLDS = 5, 10


def fitted(options: argparse.Namespace) -> Iterator[str]:
    """For each given set, and each part of it, how fits of a model's own answers rank those that were left out.

    ``stopped`` is the share of wrong answers that are stopped if 90 % of the right ones pass. Both are means over
    DIVISIONS divisions of the passages into FOLDS folds.
    """
    torch.set_num_threads(options.threads)
    engine = CocoaEngine.from_pretrained(options.model).without_calibrator()
    config = question_config(engine, engine.config.replace(max_new_tokens=64))
    profiler = Profiler(engine.session, config, (), probe_layers(engine.num_layers))
    yield "| set | wrong | AUROC | stopped | AUROC, with a probe | stopped, with a probe |"
    yield "| --- |" + " ---: |" * 5
    for kind in GIVEN:
        items = [] if getattr(options, kind) is None else list(SETS[kind](getattr(options, kind), options.limit))
        prompts = [prompt_of(engine, item.messages) for item in items]
        answers = answered(engine, items, prompts, config, answer_values)
        rows: list[tuple[Any, dict[str, Any]]] = [
            (item, {**values, **mean_state(profiler, prompt, values)})
            for prompt, (item, values) in zip(prompts, answers, strict=True)
            if values["features"] is not None
        ]
        if not rows:
            continue
        labelled = labelled_answers(rows)
        fits = [
            [left_out(items, isotonic=False, folds=FOLDS, seed=seed)[0] for seed in range(DIVISIONS)]
            for items in (replace(labelled, states=None), labelled)
        ]
        parts = np.array([item.id.partition("-")[2] for item, _ in rows])
        for part in dict.fromkeys(["", *parts.tolist()]):
            of_part = (parts == part) | (part == "")
            wrong = labelled.labels[of_part]
            if wrong.all() or not wrong.any():
                continue
            cells = [f"{kind} {part}", f"{wrong.sum()} of {len(wrong)}"]
            for divided in fits:
                risks = [risk[of_part] for risk in divided]
                area = np.mean([roc_auc_score(wrong, risk) for risk in risks])
                stopped = np.mean([risk[wrong] > np.quantile(risk[~wrong], 0.9) for risk in risks])
                cells += [f"{area:.2f}", f"{100 * stopped:.0f} %"]
            yield f"| {' | '.join(cells)} |"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to the file, which begins with their names."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys() if rows else (), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Answers(NamedTuple):
    """Answers as columns of n values."""

    scores: dict[str, Floats]
    wrong: NDArray[np.bool_]
    closed: NDArray[np.bool_]
    models: NDArray[np.str_]
    sets: NDArray[np.str_]
    groups: NDArray[np.str_]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> Answers:
        names = list(rows[0])[6:]
        values = {name: np.array([float(row[name]) for row in rows]) for name in names}
        wrong, closed = (np.array([row[name] == "1" for row in rows]) for name in ("wrong", "closed_book"))
        models, sets, groups = (np.array([row[name] for row in rows]) for name in ("model", "set", "group"))
        return cls(values, wrong, closed, models, sets, groups)

    def cells(self) -> Iterator[tuple[str, str, NDArray[np.intp]]]:
        """Each model and set, with the numbers of its answers."""
        for model in dict.fromkeys(self.models.tolist()):
            for kind in dict.fromkeys(self.sets[self.models == model].tolist()):
                yield model, kind, np.flatnonzero((self.models == model) & (self.sets == kind))

    def surprisals(self) -> Floats:
        """The surprisal of each answer, ``[n]``, see :func:`.answer_surprisal`."""
        mean = self.scores["-mean log p"]
        lengths = np.divide(self.scores["-log p"], mean, out=np.ones_like(mean), where=mean > 0)
        return mean * np.minimum(lengths, ANSWER_TOKENS)

    def left_out(self) -> Floats:
        """The risk of each answer, ``[n]``, by a logistic model of log(-log p) and mean entropy of the other models.

        Answers with a passage and without have their own. More scores rank the answers of other models worse.
        """
        columns = np.stack([np.log(self.scores["-log p"] + 1e-3), self.scores["mean entropy"]], axis=1)
        items = LabelledFeatures(["log surprisal", "mean entropy"], columns, self.wrong, self.groups.tolist())
        risks = np.full(len(self.wrong), math.nan)
        for closed in (True, False):
            part = self.closed == closed
            for model in np.unique(self.models):
                others, own = part & (self.models != model) & (self.sets != NOT_FITTED), part & (self.models == model)
                if own.any():
                    risks[own] = fit_only(items.only(others))(items.only(own))
        return risks


def table(answers: Answers) -> Iterator[str]:
    """For each model and set the AUROC of each score and of a fit on the other models, and its ECE, in Markdown."""
    risks = answers.left_out()
    columns = {"surprisal": answers.surprisals(), **answers.scores, "fit on the others": risks}
    yield f"| model | set | wrong | {' | '.join(columns)} | its ECE |"
    yield "| --- | --- |" + " ---: |" * (len(columns) + 2)
    for model, kind, own in answers.cells():
        wrong = answers.wrong[own]
        areas = [
            "" if np.isnan(values[own]).any() else f"{roc_auc_score(wrong, values[own]):.2f}"
            for values in columns.values()
        ]
        error = expected_calibration_error(reliability(risks[own], wrong))
        yield f"| {model} | {kind} | {wrong.sum()} of {len(own)} | {' | '.join(areas)} | {error:.2f} |"


MEASURED = ("Qwen 0.5B", "Qwen 1.5B")
"""The models whose right answers come with the package."""

CALIBRATED = "SmolLM2 135M"
"""The embedded model, whose claims have a calibrator."""

REFERENCE = 150
"""How many short questions the models of MEASURED were given for that."""


def right_answers(answers: Answers, models: Sequence[str], named: str = "") -> RightAnswers:
    """The distribution of models' right answers to their first short questions, as `cocoa heads` measures it."""
    short = [np.flatnonzero((answers.models == model) & (answers.sets == "short"))[:REFERENCE] for model in models]
    right = np.concatenate([of_model[~answers.wrong[of_model]] for of_model in short])
    token_risks = -np.expm1(-answers.scores["-min log p"][right])
    return lab_heads.right_answers(named, answers.surprisals()[right], token_risks)


def gate(answers: Answers) -> Iterator[str]:
    """For each model and set the right answers that pass a gate, and the wrong ones that it stops.

    The gates are those on the rank, and on the claims (``unit="claim"``); the embedded model's claims are calibrated.
    """
    names = ("at once", "after `cocoa heads`", "claims, at once", "claims, after `cocoa heads`")
    yield f"| model | set | {' | '.join(names)} |"
    yield "| --- | --- |" + " ---: |" * len(names)
    surprisals, claims = answers.surprisals(), answers.scores["riskiest claim"]
    after_heads = TypeAdapter(dict[str, RightAnswers]).validate_json(OWN.read_bytes())
    for model, kind, own in answers.cells():
        wrong = answers.wrong[own]
        cells = [""] * len(names)
        at_once = right_answers(answers, [name for name in MEASURED if name != model])
        for number, among in enumerate((at_once, after_heads.get(model))):
            if among is None:  # `cocoa heads` was not run for it
                continue
            ranks = np.array([distribution(among.surprisals, value) for value in surprisals[own]])
            for column, stopped in ((0, ranks >= ANSWER_THRESHOLD), (2, claims[own] >= among.span_threshold)):
                if column == 0 or model != CALIBRATED:
                    cells[column + number] = f"{_share(~stopped[~wrong])} / {_share(stopped[wrong])}"
        yield f"| {model} | {kind} | {' | '.join(cells)} |"


def _share(which: NDArray[np.bool_]) -> str:
    return f"{100 * which.mean():.0f} % of {len(which)}"


def main() -> None:
    """Ask a model, or print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_answers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask", help="add a model's answers")
    asking.add_argument("--name", help="name of the model in the table; default: its own")
    asking.add_argument("--batch", type=int, default=8)
    fitting = commands.add_parser("fit", help="fit a risk on a model's answers")
    for command in (asking, fitting):
        command.add_argument("--model", help="Hub name, folder or file; default: the embedded model")
        for kind in GIVEN:
            command.add_argument(f"--{kind.replace('_', '-')}", type=Path, help="file of the set; default: none")
        command.add_argument("--limit", type=int, default=150, help="questions of each set (default: %(default)s)")
        command.add_argument("--threads", type=int, default=2)
    showing = commands.add_parser("right", help="print the distribution of models' right answers")
    showing.add_argument("--models", nargs="+", default=MEASURED, help="default: %(default)s")
    showing.add_argument("--named", required=True, help="whose answers they are, for a reader")
    gating = commands.add_parser("gate", help="print what the default gate lets pass and stops")
    for command in (asking, showing, gating, commands.add_parser("table", help="print the table")):
        command.add_argument("--answers", type=Path, default=ANSWERS, help="default: %(default)s")
    options = parser.parse_args()
    if options.command == "ask":
        ask(options)
        return
    if options.command == "right":
        print(right_answers(Answers.of(read(options.answers)), options.models, options.named).model_dump_json())
        return
    if options.command == "fit":
        lines = fitted(options)
    else:
        lines = (gate if options.command == "gate" else table)(Answers.of(read(options.answers)))
    console, text = Console(), "\n".join(lines)
    console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal, markup=False)


if __name__ == "__main__":
    main()
