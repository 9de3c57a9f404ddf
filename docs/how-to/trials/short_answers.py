"""What thresholds stop: the embedded model's answers to 200 short questions, which its calibrator was not fitted on.

    python docs/how-to/trials/short_answers.py

Each line of questions.jsonl has a question and its known answers. An answer is right if it contains one of them. To
try questions about a passage, give a file such as NQ with passages: its questions are shuffled, and 200 are taken.

    python docs/how-to/trials/short_answers.py nq-open-oracle.jsonl.gz

`--instruction` asks the short questions with another instruction, or with an empty text without one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

from cocoa_engine.datasets import read_questions
from cocoa_integrations._shared.limits import Metric
from cocoa_integrations.langchain import ChatCocoa, get_risk, max_risk

QUESTIONS = Path(__file__).with_name("questions.jsonl")
INSTRUCTION = "Answer in one short sentence."
TRIALS: dict[Metric, tuple[float, ...]] = {
    "risk": (0.4, 0.5, 0.6, 0.7),
    "self_information": (2.0, 3.0, 4.0),
    "f_mlds": (0.5, 0.9, 0.95, 1.0),
}
OF_ANSWERS = (0.4, 0.5, 0.6, 0.7)


def main(path: Path, instruction: str) -> None:
    """Answer the questions and print, for each threshold, what a gate would let pass and stop."""
    questions = read_questions(path)
    Random(5).shuffle(questions)
    questions = questions[:200]
    chat = ChatCocoa(max_tokens=32)
    system = [("system", instruction)] if instruction else []
    messages = [
        [*system, ("human", one.text)] if one.context is None else [("human", one.request)] for one in questions
    ]
    answers = chat.batch([list(one) for one in messages])
    right = [question.is_right(answer.text) for question, answer in zip(questions, answers, strict=True)]
    reports: list[Any] = [get_risk(answer) for answer in answers]
    outside = sum("out_of_domain" in one for one in reports)
    print(f"{sum(right)} of {len(right)} answers are right; {outside} are out of domain")
    first = reports[0]
    show("answer_risk", [one["answer_risk"] for one in reports], right, (first["answer_threshold"], *OF_ANSWERS))
    show("risk", [max_risk(one) for one in answers], right, (first["threshold"], *TRIALS["risk"]))
    for metric in ("self_information", "f_mlds"):
        show(metric, [max_risk(one, metric) for one in answers], right, TRIALS[metric])


def show(name: str, values: list[float], right: list[bool], thresholds: tuple[float, ...]) -> None:
    """Print what each threshold would let pass and stop."""
    for threshold in sorted(set(thresholds)):
        stopped = [value >= threshold for value in values]
        passed = sum(not one for one, is_right in zip(stopped, right, strict=True) if is_right)
        wrong = sum(one for one, is_right in zip(stopped, right, strict=True) if not is_right)
        print(
            f"{name:16} {threshold:5.3f}  right answers passed {passed}/{sum(right)}, "
            f"wrong answers stopped {wrong}/{len(right) - sum(right)}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=QUESTIONS)
    parser.add_argument("--instruction", default=INSTRUCTION)
    given = parser.parse_args()
    main(given.file, given.instruction)
