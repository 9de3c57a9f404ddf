"""lm-evaluation-harness over HTTP gives what its model ``cocoa`` gives in one process."""

import json
import math
import os
from pathlib import Path
from typing import Any

from tests.conformance.tools import SuiteError, Tools, served

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " a river"], 0),
    ("Two and two is", [" four", " seven"], 0),
    ("Water freezes at", [" 100 degrees", " 0 degrees Celsius", " noon"], 1),
    ("The opposite of hot is", [" cold", " warm"], 0),
]
LENGTH = 12

TASK = """\
task: cocoa_NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
ANSWERS = """\
output_type: generate_until
doc_to_text: "{{question}} what? Answer in a few words."
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: LENGTH, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def run_harness(tools: Tools) -> str:
    """Compare log-likelihoods by completions, and answers by chat completions, with the adapter's."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ.setdefault("OPENAI_API_KEY", "none")
    from cocoa_engine import CocoaEngine
    from cocoa_integrations.lm_eval import CocoaLM

    folder = tools.folder / "lm-eval"
    _write_tasks(folder)
    engine = CocoaEngine.from_pretrained(dtype="float32")
    tokenizer = folder / "tokenizer"
    engine.tokenizer.save_pretrained(tokenizer)
    name = engine.model_name
    with served(max_new_tokens=LENGTH) as address:
        completions = {"model": name, "base_url": f"{address}/v1/completions", "max_length": 2048, "batch_size": 3}
        completions |= {"tokenizer": str(tokenizer), "tokenizer_backend": "huggingface"}
        over_http = _samples("local-completions", completions, "cocoa_choices", folder)
        chat = {"model": name, "base_url": f"{address}/v1/chat/completions", "num_concurrent": 2}
        answers = _samples("local-chat-completions", chat, "cocoa_answers", folder, chat=True)
    in_process = _samples(CocoaLM(engine=engine), {}, "cocoa_choices", folder)
    expected = _samples(CocoaLM(engine=engine), {}, "cocoa_answers", folder, chat=True)
    compared = 0
    for one, other in zip(over_http, in_process, strict=True):
        for (log_prob, greedy), (log_prob_here, greedy_here) in zip(one, other, strict=True):
            if not math.isclose(log_prob, log_prob_here, abs_tol=1e-3) or greedy != greedy_here:
                raise SuiteError(f"loglikelihoods differ: {over_http} over HTTP, {in_process} in one process")
            compared += 1
    if answers != expected:
        raise SuiteError(f"answers differ: {answers} over HTTP, {expected} in one process")
    return f"{compared} loglikelihoods and {len(answers)} answers equal"


def _write_tasks(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    data = folder / "questions.jsonl"
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
        filled = (TASK + text).replace("DATA", json.dumps(str(data))).replace("LENGTH", str(LENGTH))
        filled = filled.replace("NAME", name)
        (folder / f"{name}.yaml").write_text(filled, encoding="utf-8")


def _samples(model: Any, options: dict[str, Any], task: str, folder: Path, *, chat: bool = False) -> list[Any]:
    """The filtered answers of the harness to each question, in their order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=options or None,
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder)),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]
