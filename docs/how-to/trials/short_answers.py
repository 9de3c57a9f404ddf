"""What thresholds stop: the embedded model's answers to 200 short questions, which its calibrator was not fitted on.

    python docs/how-to/trials/short_answers.py
    python docs/how-to/trials/short_answers.py --ask words
    python docs/how-to/trials/short_answers.py --ask plain

Each line of questions.jsonl has a question and its known answers. An answer is right if it contains one of them. The
questions are asked with the system message "Answer in one short sentence.", with "Answer in a few words." after the
question, or alone. To try questions about a passage, give a file such as NQ with passages: its questions are shuffled,
and 200 are taken. They are asked to be answered in a few words.

    python docs/how-to/trials/short_answers.py nq-open-oracle.jsonl.gz

The answers are those of the default settings. Others can be given; a risk that does not apply to them is not shown.

    python docs/how-to/trials/short_answers.py nq-open-oracle.jsonl.gz --limit 96 --method greedy --max-new-tokens 24
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

from sklearn.metrics import roc_auc_score

from cocoa_engine import CocoaEngine, Generation
from cocoa_engine.config import MethodName
from cocoa_engine.datasets import Question, read_questions
from cocoa_engine.studies.fitting.validation import expected_calibration_error, reliability

QUESTIONS = Path(__file__).with_name("questions.jsonl")
TRIALS: dict[str, tuple[float, ...]] = {
    "answer_risk": (0.4, 0.5, 0.6, 0.7),
    "risk": (0.4, 0.5, 0.6, 0.7),
    "self_information": (2.0, 3.0, 4.0),
    "f_mlds": (0.5, 0.9, 0.95, 1.0),
    "-mean log p": (),
    "-min log p": (),
}


def main(path: Path, ask: str, limit: int, method: MethodName, max_new_tokens: int | None) -> None:
    """Answer the questions and print, for each value, how it ranks them and what thresholds let pass and stop."""
    questions = read_questions(path)
    if path != QUESTIONS:
        Random(5).shuffle(questions)
    questions = questions[:limit]
    engine = CocoaEngine.from_pretrained()
    prompts = [engine.encode_chat(messages(one, ask)) for one in questions]
    tokens = max_new_tokens or (48 if ask == "plain" else 32)
    answers = engine.generate_batch(prompts, method=method, max_new_tokens=tokens)
    right = [question.is_right(answer.text) for question, answer in zip(questions, answers, strict=True)]
    outside = sum(answer.answer_out_of_domain for answer in answers)
    print(f"{sum(right)} of {len(right)} answers are right; {outside} are out of the domain of answer_risk")
    wrong, defaults = (
        [not one for one in right],
        {"answer_risk": answers[0].answer_threshold, "risk": answers[0].threshold},
    )
    risks = [answer.answer_risk for answer in answers if answer.answer_risk is not None]
    if risks:
        print(f"answer_risk      ECE {expected_calibration_error(reliability(risks, wrong)):.3f}")
    for name, thresholds in TRIALS.items():
        if name == "answer_risk" and not risks:
            continue
        values = [value_of(answer, name) for answer in answers]
        print(f"{name:16} AUROC {roc_auc_score(wrong, values):.3f}")
        default = defaults.get(name)
        for threshold in sorted({*thresholds, *([] if default is None else [default])}):
            show(name, values, right, threshold)


def messages(question: Question, ask: str) -> list[dict[str, str]]:
    """The chat that asks a question."""
    if question.context is not None or ask == "words":
        return [{"role": "user", "content": question.request}]
    system = [{"role": "system", "content": "Answer in one short sentence."}] if ask == "sentence" else []
    return [*system, {"role": "user", "content": question.text}]


def value_of(answer: Generation, name: str) -> float:
    """The value of an answer that a threshold is compared with; of spans the highest."""
    if name == "answer_risk":
        return answer.answer_risk or 0.0
    log_probs = [value for span in answer.spans for value in span.token_log_probs]
    if name == "-mean log p":
        return -sum(log_probs) / len(log_probs)
    if name == "-min log p":
        return -min(log_probs)
    spans = [span for span in answer.spans if span.text.strip()]
    return max((getattr(span, name) for span in spans), default=0.0)


def show(name: str, values: Sequence[float], right: Sequence[bool], threshold: float) -> None:
    """Print what a threshold would let pass and stop."""
    passed = sum(value < threshold for value, is_right in zip(values, right, strict=True) if is_right)
    stopped = sum(value >= threshold for value, is_right in zip(values, right, strict=True) if not is_right)
    print(
        f"{name:16} {threshold:5.3f}  right answers passed {passed}/{sum(right)}, "
        f"wrong answers stopped {stopped}/{len(right) - sum(right)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=QUESTIONS, help="other questions")
    parser.add_argument("--ask", choices=["sentence", "words", "plain"], default="sentence", help="how to ask them")
    parser.add_argument("--limit", type=int, default=200, help="the number of questions")
    parser.add_argument("--method", choices=["cocoa-sig", "cocoa", "greedy"], default="cocoa-sig")
    parser.add_argument("--max-new-tokens", type=int, help="default: 32, or 48 without an instruction")
    given = parser.parse_args()
    main(given.file, given.ask, given.limit, given.method, given.max_new_tokens)
