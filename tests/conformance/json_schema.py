"""JSON-Schema-Test-Suite: an answer with any of its schemas validates, or the request or the answer is refused."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import torch
from jsonschema_specifications import REGISTRY

from cocoa_engine import ConfigError, GrammarProcessor
from cocoa_engine.errors import IncompleteAnswerError
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.conformance.tools import SuiteError, Tools
from tests.helpers.tiny_models import engine_for_schemas

DRAFTS: dict[str, Any] = {
    f"draft{name}": getattr(jsonschema, f"Draft{name.replace('-', '')}Validator")
    for name in ("2020-12", "2019-09", "7", "6", "4", "3")
}
WALKS = 4
"""Answers to each schema."""
LONGEST = 120
"""Tokens of an answer; longer ones count as cut off."""


def run_json_schema(tools: Tools) -> str:
    counts = Counter[str]()
    for draft in DRAFTS:
        for schema in schemas_of(tools.source("jsonschema"), draft):
            counts[outcome(draft, schema)] += 1
    if wrong := [name for name in counts if name.startswith("WRONG")]:
        raise SuiteError("\n".join(wrong))
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def schemas_of(source: Path, draft: str) -> Iterator[dict[str, Any]]:
    """The schemas of a draft that are objects, which say what draft they are of."""
    name = DRAFTS[draft].META_SCHEMA.get("$schema")
    for file in sorted((source / "json" / "tests" / draft).rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], dict):
                yield {"$schema": name, **case["schema"]}


def outcome(draft: str, schema: dict[str, Any]) -> str:
    """What becomes of answers with a schema: a few words for a count, which begin with WRONG if the rule is broken."""
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    try:
        plan = Plan(ToolRequest.of(response_format=response_format), engine_for_schemas())
        [processor] = plan.processors()
    except ConfigError as error:
        return "schemas refused before decoding" if "\n" not in str(error) else f"WRONG message: {error}"
    validator, chance, results = DRAFTS[draft](schema, registry=REGISTRY), random.Random(0), set()
    for _ in range(WALKS):
        try:
            text = walk(processor.for_prompt([]), chance)
        except ConfigError as error:
            return f"WRONG: {schema} is refused in the middle of an answer: {error}"
        if text is None:
            continue
        try:
            plan.read(text)
        except IncompleteAnswerError:
            results.add("with answers reported as errors")
            continue
        try:
            wrong = not validator.is_valid(json.loads(text))
        except re.error:  # an expression of ECMAScript that Python cannot read
            continue
        if wrong:
            return f"WRONG: {text} does not fit {schema}"
    return "schemas " + (results.pop() if results else "whose answers validate")


def walk(processor: GrammarProcessor, chance: random.Random) -> str | None:
    """A random text that the masks allow; `None` if it does not end soon."""
    tokenizer = engine_for_schemas().tokenizer
    closing, ids = {tokenizer(each).input_ids[0] for each in '"}]'}, list[int]()
    for length in range(LONGEST):
        scores = processor(torch.tensor([ids], dtype=torch.long), torch.zeros(1, len(tokenizer)))
        allowed = (scores[0] == 0).nonzero().flatten().tolist()
        ending = [token for token in allowed if token in closing]
        if tokenizer.eos_token_id in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return str(tokenizer.decode(ids))
        likely = ending if ending and chance.random() < 0.4 + length / LONGEST else allowed
        if (token := chance.choice(likely)) == tokenizer.eos_token_id:
            return str(tokenizer.decode(ids))
        ids.append(token)
    return None
