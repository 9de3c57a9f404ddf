"""What thresholds stop: the embedded model's answers to 200 short questions, which its calibrator was not fitted on.

    python docs/how-to/trials/short_answers.py
    python docs/how-to/trials/short_answers.py --ask words
    python docs/how-to/trials/short_answers.py --ask plain

Each line of questions.jsonl has a question and its known answers. An answer is right if it contains one of them. The
questions are asked with the system message "Answer in one short sentence.", with "Answer in a few words." after the
question, or alone. To try questions about a passage, give a file such as NQ with passages: its questions are shuffled,
and 200 are taken. They are asked to be answered in a few words.

    python docs/how-to/trials/short_answers.py nq-open-oracle.jsonl.gz

`--history` puts an earlier exchange before the question, which makes the prompt longer than 64 tokens. The answers are
those of the default settings. Others can be given; a risk that does not apply to them is not shown.

    python docs/how-to/trials/short_answers.py nq-open-oracle.jsonl.gz --limit 96 --method greedy --max-new-tokens 24
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from sklearn.metrics import roc_auc_score

from cocoa_engine import CocoaEngine, Generation, RiskCalibrator
from cocoa_engine.config import MethodName
from cocoa_engine.lab.data import Question, read_questions
from cocoa_engine.lab.statistics import Bootstrap, Ranked, expected_calibration_error, reliability
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, heads_of_model
from cocoa_engine.risk.policy import RANK_THRESHOLD, token_risk

QUESTIONS = Path(__file__).with_name("questions.jsonl")
HISTORY = (
    {"role": "user", "content": "I want to practise for a quiz. Will you help me?"},
    {
        "role": "assistant",
        "content": "Of course. Ask me whatever you like, from geography, history, science, literature or sport, and I "
        "will answer as well as I can. If you are not sure about something, tell me, and we will look at it together.",
    },
)
TRIALS: dict[str, tuple[float, ...]] = {
    "answer_risk": (0.4, 0.5, 0.6, 0.7),
    "short fit": (),
    "passage fit": (),
    "risk": (0.2, 0.4, 0.5, 0.6, 0.7),
    "token_probability": (0.8, 0.9, 0.95, 0.98),
    "source_attention": (0.8, 0.9, RANK_THRESHOLD, 0.98),
    "self_information": (2.0, 3.0, 4.0),
    "f_mlds": (0.5, 0.9, 0.95, 1.0),
    "-mean log p": (),
    "-min log p": (),
}


def main(path: Path, ask: str, limit: int, method: MethodName, max_new_tokens: int | None, history: bool) -> None:
    """Answer the questions and print, for each value, how it ranks them and what thresholds let pass and stop."""
    questions = read_questions(path)
    if path != QUESTIONS:
        Random(5).shuffle(questions)
    questions = questions[:limit]
    engine = CocoaEngine.from_pretrained()
    prompts = [engine.encode_chat(messages(one, ask, history)) for one in questions]
    tokens = max_new_tokens or (48 if ask == "plain" else 32)
    answers = engine.generate_batch(prompts, method=method, max_new_tokens=tokens)
    right = [question.is_right(answer.text) for question, answer in zip(questions, answers, strict=True)]
    outside = sum(answer.answer_out_of_domain for answer in answers)
    print(f"{sum(right)} of {len(right)} answers are right; {outside} are out of the domain of answer_risk")
    wrong, calibrated = [not one for one in right], answers[0].answer_risk is not None
    heads = heads_of_model(None, engine.session.model)
    found_values: dict[str, list[float]] = {}
    for name, thresholds in TRIALS.items():
        if not calibrated and name in ("answer_risk", "short fit", "passage fit", "risk"):
            continue
        values = [value_of(answer, name, engine.calibrator, heads) for answer in answers]
        found_values[name] = values
        print(f"{name:17} AUROC {roc_auc_score(wrong, values):.3f}")
        if name in ("answer_risk", "short fit", "passage fit"):
            found, exact = expected_calibration_error(reliability(values, wrong)), ece_if_exact(values)
            mean, share = sum(values) / len(values), sum(wrong) / len(wrong)
            print(f"{name:17} ECE {found:.3f} ({exact:.3f} if exact), mean risk {mean:.3f}, {share:.3f} are wrong")
        defaults = {} if not calibrated else default_thresholds(answers[0], engine.calibrator)
        for threshold in sorted({*thresholds, *defaults.get(name, ())}):
            show(name, values, right, threshold)
        passing = sorted(value for value, is_right in zip(values, right, strict=True) if is_right)
        show(name, values, right, passing[round(0.8 * len(passing))], "  <- 80 % of the right answers pass")
    if calibrated:
        compare(found_values, wrong, [question.group for question in questions])


def ece_if_exact(risks: Sequence[float], *, draws: int = 1000, seed: int = 0) -> float:
    """The mean ECE that these risks would have if each were exactly the probability of a hallucination.

    It is above 0, because the share of a bin with few items is rarely its probability. An ECE near it does not show
    that the risks are wrong. The labels are drawn ``draws`` times.
    """
    values = np.asarray(risks, dtype=np.float64)
    drawn = np.random.default_rng(seed).random((draws, len(values))) < values
    return float(np.mean([expected_calibration_error(reliability(values, labels)) for labels in drawn]))


def compare(values: dict[str, list[float]], wrong: Sequence[bool], groups: Sequence[str]) -> None:
    """Print how much better ``answer_risk`` ranks the answers than others do, with 95 % intervals over questions."""
    bootstrap, labels = Bootstrap(groups, 1000, 0), [float(one) for one in wrong]
    ranked = {name: Ranked(one, labels, [1 - label for label in labels]) for name, one in values.items()}
    for name in ("risk", "-mean log p", "-min log p", "f_mlds"):
        shown = bootstrap.difference(ranked["answer_risk"], ranked[name], "auroc").shown("+.3f")
        print(f"AUROC of answer_risk minus that of {name}: {shown}")


def messages(question: Question, ask: str, history: bool) -> list[dict[str, str]]:
    """The chat that asks a question."""
    before = list(HISTORY) if history else []
    if question.context is not None or ask == "words":
        return [*before, {"role": "user", "content": question.request}]
    system = [{"role": "system", "content": "Answer in one short sentence."}] if ask == "sentence" else []
    return [*system, *before, {"role": "user", "content": question.text}]


def default_thresholds(answer: Generation, calibrator: RiskCalibrator | None) -> dict[str, tuple[float, ...]]:
    """The thresholds that apply without a number."""
    assert calibrator is not None
    fits = {"short fit": calibrator.closed_book, "passage fit": calibrator.answer}
    known = {
        name: (fit.threshold.value,) for name, fit in fits.items() if fit is not None and fit.threshold is not None
    }
    return {"answer_risk": (answer.answer_threshold or 0.0,), "risk": (answer.threshold or 0.0,), **known}


def value_of(answer: Generation, name: str, calibrator: RiskCalibrator | None, heads: RetrievalHeads | None) -> float:
    """The value of an answer that a threshold is compared with; of spans the highest."""
    if name == "answer_risk":
        return answer.answer_risk or 0.0
    if name in ("short fit", "passage fit"):  # the length of the prompt chooses between them
        assert calibrator is not None
        counted = 1 if name == "short fit" else 1000
        return calibrator.answer_risk(answer.model_copy(update={"question_tokens": counted}))
    log_probs = [value for span in answer.spans for value in span.token_log_probs]
    if name == "-mean log p":
        return -sum(log_probs) / len(log_probs)
    if name == "-min log p":
        return -min(log_probs)
    spans = [span for span in answer.spans if span.text.strip()]
    if name == "token_probability":
        return max((token_risk(span.token_log_probs) for span in spans), default=0.0)
    if name == "source_attention":
        assert heads is not None
        return max((heads.rank(span.source_attention) or 0.0 for span in spans), default=0.0)
    return max((getattr(span, name) for span in spans), default=0.0)


def show(name: str, values: Sequence[float], right: Sequence[bool], threshold: float, note: str = "") -> None:
    """Print what a threshold would let pass and stop."""
    passed = sum(value < threshold for value, is_right in zip(values, right, strict=True) if is_right)
    stopped = sum(value >= threshold for value, is_right in zip(values, right, strict=True) if not is_right)
    print(
        f"{name:17} {threshold:5.3f}  right answers passed {passed}/{sum(right)}, "
        f"wrong answers stopped {stopped}/{len(right) - sum(right)}{note}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=QUESTIONS, help="other questions")
    parser.add_argument("--ask", choices=["sentence", "words", "plain"], default="sentence", help="how to ask them")
    parser.add_argument("--limit", type=int, default=200, help="the number of questions")
    parser.add_argument("--method", choices=["cocoa-sig", "cocoa", "greedy"], default="cocoa-sig")
    parser.add_argument("--max-new-tokens", type=int, help="default: 32, or 48 without an instruction")
    parser.add_argument("--history", action="store_true", help="put an earlier exchange before the question")
    given = parser.parse_args()
    main(given.file, given.ask, given.limit, given.method, given.max_new_tokens, given.history)
