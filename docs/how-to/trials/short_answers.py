"""Which thresholds let right answers pass: 60 short questions, the embedded model's answers graded by hand.

    python docs/how-to/trials/short_answers.py

Each line of questions.jsonl has a question, the answer that was graded, and whether everything in it is right. An
answer that comes out differently on your machine is not counted.
"""

from __future__ import annotations

import json
from pathlib import Path

from cocoa_integrations._shared.limits import Metric
from cocoa_integrations.langchain import ChatCocoa, max_risk

GRADED = Path(__file__).with_name("questions.jsonl")
INSTRUCTION = "Answer in one short sentence."
TRIALS: tuple[tuple[str, Metric, tuple[float, ...]], ...] = (
    ("risk, calibrator='embedded'", "risk", (0.4, 0.5, 0.6, 0.7)),
    ("self_information", "self_information", (2.0, 3.0, 4.0)),
    ("raw fMLDS", "f_mlds", (0.5, 0.9, 0.95, 1.0)),
)


def main() -> None:
    """Answer the questions and print, for each threshold, what a gate would let pass and stop."""
    records = [json.loads(line) for line in GRADED.read_text(encoding="utf-8").splitlines()]
    chat = ChatCocoa(max_tokens=32, calibrator="embedded")
    answers = chat.batch([[("system", INSTRUCTION), ("human", record["question"])] for record in records])
    graded = [
        (record["right"], answer)
        for record, answer in zip(records, answers, strict=True)
        if answer.text == record["answer"]
    ]
    print(f"{len(graded)} of {len(records)} answers are the graded ones")
    for name, metric, thresholds in TRIALS:
        values = [(right, max_risk(answer, metric)) for right, answer in graded]
        for threshold in thresholds:
            passed = [value < threshold for right, value in values if right]
            stopped = [value >= threshold for right, value in values if not right]
            print(
                f"{name:28} {threshold:4}  right answers passed {sum(passed)}/{len(passed)}, "
                f"wrong answers stopped {sum(stopped)}/{len(stopped)}"
            )


if __name__ == "__main__":
    main()
