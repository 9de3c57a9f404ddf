"""Does the shading lead to the error? The first answers to short questions that are wrong, with what a reader is shown.

    python docs/how-to/trials/shading.py

The embedded model answers questions.jsonl with the system message "Answer in one short sentence." Of each answer that
contains no known answer, the script prints the question, the known answer, the answer, and the claims to check,
riskiest first. Where the error is, a person has to say:
docs/explanation/risk-trial.md has this for the first 20.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from cocoa_engine import CocoaEngine
from cocoa_engine.lab.data import read_questions

QUESTIONS = Path(__file__).with_name("questions.jsonl")


def main(count: int) -> None:
    """Print the first ``count`` wrong answers."""
    engine = CocoaEngine.from_pretrained()
    system = {"role": "system", "content": "Answer in one short sentence."}
    asked = (
        (question, engine.chat([system, {"role": "user", "content": question.text}], max_new_tokens=32))
        for question in read_questions(QUESTIONS)
    )
    wrong = ((question, answer) for question, answer in asked if not question.is_right(answer.text))
    for number, (question, answer) in enumerate(islice(wrong, count), 1):
        checks = ", ".join(f"{check.text} ({check.risk:.2f})" for check in answer.check_these())
        print(f"{number}. {question.text} ({question.answers[0]})")
        print(f"   {' '.join(answer.text.split())}")
        print(f"   risk {answer.answer_risk:.2f}; check: {checks}; of {len(answer.claims)} claims", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20, help="how many wrong answers to print")
    main(parser.parse_args().count)
