"""How often a model calls the right tool with the right arguments, and whether risks find the wrong arguments.

``tool_tasks.jsonl`` holds 60 tasks of our own over 6 tools: choose a tool, fill in its arguments, later turns, no tool
needed, missing information. Each is answered in the model's own format of calls and in the one that is described to
models without one. Run ``python -m benchmarks.tools --model model.gguf``; the answers are kept in ``--out``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markdown import Markdown
from sklearn.metrics import roc_auc_score

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, argument_risks

TASKS = Path(__file__).with_name("tool_tasks.jsonl")
METHODS = ("greedy", "cocoa-sig")
FORMATS = ("own", "described")
KINDS = ("choose", "arguments", "turns", "none", "missing")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template without tools, for models with these control tokens: tools are then described in a message."""


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Get the current weather in a city."""
    raise NotImplementedError


def convert_currency(amount: float, source: str, target: str) -> str:
    """Convert an amount of money. Currencies are ISO 4217 codes such as EUR."""
    raise NotImplementedError


def search_flights(origin: str, destination: str, date: date) -> str:
    """Search for flights between two cities on a day."""
    raise NotImplementedError


def set_timer(minutes: int, label: str = "") -> str:
    """Set a timer that rings after some minutes."""
    raise NotImplementedError


def send_email(to: str, subject: str, body: str) -> str:
    """Send an email."""
    raise NotImplementedError


def find_product(query: str, max_price: float | None = None) -> str:
    """Search the shop for a product, by what it is and its highest price in euros."""
    raise NotImplementedError


TOOLS = (get_weather, convert_currency, search_flights, set_timer, send_email, find_product)


def main() -> None:
    """Answer the tasks that the file of answers lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hub name, folder or file; default: the embedded model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("tools.jsonl"), help="answers; continued if it exists")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tasks = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    combinations = [
        (format_, method, number) for format_ in FORMATS for method in METHODS for number in range(len(tasks))
    ]
    engine: CocoaEngine | None = None
    for format_, method, number in combinations[len(done) :]:
        engine = engine or CocoaEngine.from_pretrained(options.model)
        own = engine.tokenizer.chat_template
        try:
            engine.tokenizer.chat_template = own if format_ == "own" else CHATML
            answer = answered(engine, method, tasks[number])
        finally:
            engine.tokenizer.chat_template = own
        done.append({"format": format_, "method": method, "task": number, **answer})
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
    console, text = Console(), "\n".join(table(done, tasks))
    console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal, markup=False)


def answered(engine: CocoaEngine, method: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """The calls of an answer to a task, with the risks of their arguments, and its text."""
    chat = ChatCocoa(engine=engine, method=method, max_tokens=128).bind_tools(TOOLS)
    message = chat.invoke(task["messages"])
    risks = argument_risks(message)
    return {
        "calls": [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls],
        "risks": [
            {name: risk.risk for name, risk in risks.get(str(call["id"]), {}).items()} for call in message.tool_calls
        ],
        "invalid": [{"name": call["name"], "arguments": call["args"]} for call in message.invalid_tool_calls],
        "text": message.text,
    }


def is_right(value: Any, accepted: Sequence[Any] | None) -> bool:
    """Whether an argument is one of the accepted values, whatever the case of texts. ``None`` accepts any text."""
    if accepted is None:
        return isinstance(value, str) and bool(value.strip())
    plain = value.strip().casefold() if isinstance(value, str) else value
    return any(plain == (other.casefold() if isinstance(other, str) else other) for other in accepted)


def judged(answer: Mapping[str, Any], task: Mapping[str, Any]) -> tuple[bool, bool | None, list[tuple[bool, float]]]:
    """Whether the tool is right (none, where none is wanted), its arguments, and each argument's fault and risk.

    Arguments are those that the task names; a call with a fault in one of them, or without one, is wrong.
    """
    expected, calls = task["call"], answer["calls"]
    if expected is None or not calls or calls[0]["name"] != expected["name"]:
        return (expected is None and not calls and not answer["invalid"]), None, []
    given = calls[0]["arguments"]
    right = {
        name: name in given and is_right(given[name], accepted) for name, accepted in expected["arguments"].items()
    }
    risks = answer["risks"][0]
    return True, all(right.values()), [(not right[name], risks[name]) for name in right if name in risks]


def table(answers: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each format and method, in Markdown."""
    yield f"| format | method | {' | '.join(f'tool: {kind}' for kind in KINDS)} | arguments | invalid | AUROC of risk |"
    yield "| --- " * (len(KINDS) + 5) + "|"
    for format_ in FORMATS:
        for method in METHODS:
            own = [answer for answer in answers if (answer["format"], answer["method"]) == (format_, method)]
            judgements = [judged(answer, tasks[answer["task"]]) for answer in own]
            kinds = [tasks[answer["task"]]["kind"] for answer in own]
            shares = []
            for kind in KINDS:
                tools = [tool for (tool, _, _), of in zip(judgements, kinds, strict=True) if of == kind]
                shares.append(f"{sum(tools)} of {len(tools)}")
            complete = [arguments for _, arguments, _ in judgements if arguments is not None]
            pairs = [pair for _, _, pairs in judgements for pair in pairs]
            faults = [fault for fault, _ in pairs]
            area = f"{roc_auc_score(faults, [risk for _, risk in pairs]):.2f}" if 0 < sum(faults) < len(faults) else "–"
            invalid = sum(bool(answer["invalid"]) for answer in own)
            yield (
                f"| {format_} | {method} | {' | '.join(shares)} | {sum(complete)} of {len(complete)} | {invalid} "
                f"| {area} ({sum(faults)} of {len(faults)} wrong) |"
            )


if __name__ == "__main__":
    main()
