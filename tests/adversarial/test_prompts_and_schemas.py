"""Prompts and JSON schemas of any form, and threads that fail: an answer, or one short error for those alone.

What a model wrote stays text in every rendering: no markup, no script, no terminal codes, no reversed text.
"""

import io
import json
import pickle
import random
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from cocoa_engine import Cancellation, Candidate, CocoaEngine, CocoaError, Generation, RequestCancelledError, Span
from cocoa_engine.cli.output import print_note
from cocoa_engine.errors import DataError, PromptError
from cocoa_engine.rendering.terminal import report, show, table
from cocoa_engine.risk import CalibrationWarning
from tests.helpers.alike import answers, risk_report
from tests.helpers.drawn import Page, drawn
from tests.helpers.in_threads import together
from tests.helpers.inside import assert_idle
from tests.helpers.made_up_answers import ATTACK, figures, generation
from tests.helpers.mutations import CONTROLS, ESCAPES, MESSAGE_LIMIT, fuzz, mutated_json, outcome
from tests.helpers.tiny_models import VOCAB_SIZE, endless, pieces_tokenizer, prompt, tiny_model

ENDLESS = endless()
PIECES = CocoaEngine(tiny_model("llama", seed=2), pieces_tokenizer())
PROMPTS = st.one_of(
    st.text(max_size=60),
    st.text(st.characters(categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Mn")), max_size=30),
    st.text(alphabet=ESCAPES + "<eos>|<bos><pad> שלום مرحبا\u200f", max_size=40),
    st.sampled_from(
        ["", " ", "\n", "\0", "<eos>", "<bos>" * 50, "<pad><eos><bos>", "a" * 20_000, "😀" * 3000, "\ufeff"]
    ),
    st.lists(st.integers(-2, VOCAB_SIZE + 1), max_size=12),
    st.sampled_from([None, 5, b"a", [1.5], [None], [True], ["a"], [[1]], {"a": 1}, {1, 2}, range(3), (5, 6), [10**30]]),
)


@pytest.mark.slow
@fuzz(60)
@given(PROMPTS, st.sampled_from(["generate", "stream", "score", "batch"]))
@example("\ud800", "batch")
@example("", "batch")
@example("a" * 20_000, "stream")
def test_prompts(given_prompt: Any, kind: str) -> None:
    for engine in (ENDLESS, PIECES):
        both = [prompt(1), given_prompt]
        calls: dict[str, Any] = {
            "generate": partial(engine.generate, given_prompt, max_new_tokens=3),
            "stream": lambda engine=engine: list(engine.stream(given_prompt, max_new_tokens=3)),
            "score": partial(engine.score, given_prompt, given_prompt),
            "batch": partial(engine.generate_batch, both, max_new_tokens=3, return_exceptions=True),
        }
        found = outcome(calls[kind])
        assert isinstance(found, (Generation, list, PromptError))
        if kind == "batch" and isinstance(found, list):
            alone = engine.generate(prompt(1), max_new_tokens=3)
            assert found[0].token_ids == alone.token_ids
            assert isinstance(found[1], PromptError if given_prompt in ("", "\ud800") else (Generation, PromptError))


@pytest.mark.parametrize("token", range(3))
def test_special_tokens_in_the_middle_of_a_prompt(token: int) -> None:
    answer = ENDLESS.generate([5, token, 6, token], max_new_tokens=4)
    assert len(answer.token_ids) == 4
    assert answer.token_ids == ENDLESS.generate([5, token, 6, token], max_new_tokens=4).token_ids


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "more": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"leaf": {"$ref": "#/$defs/leaf"}}}},
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return schema


HARD = {
    "empty": {},
    "deep": nested(150),
    "circle of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "reference to itself": {"$ref": "#"},
    "reference to itself in a property": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "required": ["a"],
        "$defs": {"a": {"$ref": "#/$defs/a"}},
    },
    "reference to nothing": {"$ref": "#/$defs/none"},
    "reference to elsewhere": {"$ref": "https://example.org/schema.json"},
    "large enum": {"enum": [f"value {number}" for number in range(3000)]},
    "no value": {"enum": []},
    "contradiction": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "numbers": {"type": "integer", "minimum": 5, "maximum": 4},
    "lengths": {"type": "string", "minLength": 10, "maxLength": 2},
    "not": {"not": {}},
    "false property": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "many of the same": {"type": "array", "minItems": 100_000, "items": {"type": "null"}},
    "a pattern that backtracks": {"type": "string", "pattern": "^(a+)+$"},
    "a pattern that is none": {"type": "string", "pattern": "(["},
    "escapes": {"type": "object", "properties": {ESCAPES: {"const": ESCAPES}}, "required": [ESCAPES]},
    "a surrogate": {"const": "\ud800"},
}


def constrained(engine: CocoaEngine, schema: Any) -> Generation:
    return engine.generate([5, 6, 7], logits_processor=engine.constrain(json_schema=schema), max_new_tokens=24)


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas(tiny: CocoaEngine, name: str) -> None:
    found = outcome(lambda: constrained(tiny, HARD[name]))
    assert isinstance(found, (Generation, CocoaError))
    if isinstance(found, Generation) and found.finish_reason == "eos":
        json.loads(found.text)
    assert len(tiny.generate([5, 6], max_new_tokens=2).token_ids) <= 2


@fuzz(20)
@given(mutated_json(SCHEMA))
def test_changed_schemas(tiny: CocoaEngine, schema: Any) -> None:
    found = outcome(lambda: constrained(tiny, schema))
    if isinstance(found, Generation) and found.finish_reason == "eos":
        json.loads(found.text)


TEXTS = st.one_of(
    st.text(),
    st.text(alphabet=ESCAPES + "\u202b\u2069a"),
    st.text(alphabet="a\ud800\udcff"),
    st.sampled_from(["\u202e" * 5000, "x" * 10**6 + "\x1b" * 700]),
)


@fuzz(50)
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_any_text_in_a_message(texts: list[str]) -> None:
    for message in (str(DataError("; ".join(texts))), str(CalibrationWarning.of(texts))):
        assert len(message) <= MESSAGE_LIMIT
        assert not CONTROLS.search(message)
        message.encode()


def test_the_end_of_a_long_message_stays() -> None:
    error = DataError("\u202e" * 5000 + " is too long; shorten it")
    message = str(error)
    assert str(pickle.loads(pickle.dumps(error))) == message
    assert message.startswith("<U+202E>")
    assert message.endswith("; shorten it")


JOBS = 48
TOKENS = 10


class RaisedError(Exception):
    """What a callback raises."""


def raising(after: int) -> Callable[..., Any]:
    """A logits processor or criterion that raises after some calls."""
    calls = iter(range(after))

    def process(input_ids: Any, scores: Any, **_: Any) -> Any:
        if next(calls, None) is None:
            raise RaisedError("a callback failed")
        return scores

    return process


def generated(engine: CocoaEngine, seed: int) -> Generation:
    return engine.generate(prompt(seed), max_new_tokens=TOKENS)


def batched(engine: CocoaEngine, seed: int) -> Generation:
    prompts = ["\ud800", prompt(seed)]
    return engine.generate_batch(prompts, max_new_tokens=TOKENS, return_exceptions=True)[1]


def closed_early(engine: CocoaEngine, seed: int) -> None:
    with engine.stream(prompt(seed), max_new_tokens=1000) as stream:
        next(stream)


def cancelled(engine: CocoaEngine, seed: int) -> Any:
    cancellation = Cancellation()
    timer = threading.Timer(0.001 * (seed % 7), cancellation.cancel)
    timer.start()
    try:
        return engine.generate(prompt(seed), max_new_tokens=5000, cancellation=cancellation)
    finally:
        timer.join(60)


def cancelled_at_once(engine: CocoaEngine, seed: int) -> Any:
    cancellation = Cancellation()
    cancellation.cancel()
    return list(engine.stream(prompt(seed), max_new_tokens=5000, cancellation=cancellation))


SETTINGS = {"gamma": 2.0, "max_new_tokens": 0, "nonsense": 1, "stop": [5], "method": "x"}
BAD_SETTINGS = [{name: value} for name, value in SETTINGS.items()]
BAD_PROMPTS: list[Any] = ["", None, [10**6], "\ud800", [5] * 10_000]
ANSWERED: dict[Callable[..., Any], type] = {
    generated: Generation,
    lambda engine, seed: answers(engine.stream(prompt(seed), max_new_tokens=TOKENS))[0]: Generation,
    batched: Generation,
}
KINDS: dict[Callable[..., Any], type] = {
    **ANSWERED,
    closed_early: type(None),
    lambda engine, seed: next(engine.stream(prompt(seed), max_new_tokens=1000)): Span,
    cancelled: RequestCancelledError,
    cancelled_at_once: RequestCancelledError,
    lambda engine, seed: engine.generate(prompt(seed), logits_processor=[raising(seed % 9)]): RaisedError,
    lambda engine, seed: list(engine.stream(prompt(seed), stopping_criteria=[raising(0)])): RaisedError,
    lambda engine, seed: engine.generate(prompt(seed), **BAD_SETTINGS[seed % 5]): CocoaError,
    lambda engine, seed: engine.generate(BAD_PROMPTS[seed % 5]): PromptError,
}


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_faults_do_not_reach_other_calls(max_batch_size: int) -> None:
    engine = endless(max_batch_size=max_batch_size)
    expected = {seed: generated(engine, seed).text for seed in range(6)}
    threads = set(threading.enumerate())
    dice = random.Random(max_batch_size)
    jobs = [(kind, dice.randrange(6)) for kind in dice.choices([*KINDS], k=JOBS)]
    calls = [partial(kind, engine, seed) for kind, seed in jobs]
    results = [result for start in range(0, len(calls), 16) for result in together(calls[start : start + 16])]
    assert {kind for kind, _ in jobs} == KINDS.keys()
    for (kind, seed), result in zip(jobs, results, strict=True):
        assert isinstance(result, KINDS[kind]), result
        if kind in ANSWERED:
            assert result.text == expected[seed]
    assert_idle(engine)
    assert set(threading.enumerate()) <= threads
    assert generated(engine, 0).text == expected[0]


MARKUP = [
    *ATTACK,
    "</text></svg><svg onload=alert(1)>",
    "]]><!--",
    "<style>*{display:none}</style>",
    '"><a href="javascript:alert(1)">x</a>',
    "![x](https://example.org/x.png) [y](javascript:alert(1))",
    "| a | b |\n| --- | --- |",
    "[bold red]x[/bold red] [link=https://example.org]y[/link]",
    "$\\frac{1}{0}$ $\\input{/etc/passwd}$",
    "\x1b]8;;https://example.org\x07click\x1b]8;;\x07",
    "\x1b[2J\x1b[H\x9b31m\x90q\x9c",
    "\u202egnp.exe",
    "\u0378\U000e0001\ufdd0\uffff",  # unassigned, a tag, no characters
    "e\u0301\u0301\u0301" * 10 + "\u200d\u200b\ufeff",
]
NOT_SURROGATE = st.characters(exclude_categories=("Cs",))
DRAWN_TEXTS = st.one_of(
    st.sampled_from(MARKUP),
    st.text(NOT_SURROGATE, max_size=40),
    st.text(alphabet="<>&\"'`|[](){}*_#\\/=!$-;:\n\t " + ESCAPES, max_size=40),
)
ANSWERS = st.lists(st.tuples(DRAWN_TEXTS, st.sampled_from([0.1, 0.5, 0.9])), min_size=1, max_size=4)


def answered(parts: list[tuple[str, float]], rival: str = "") -> Generation:
    """An answer of these spans; the last one beat another candidate."""
    candidates = [
        Candidate(**figures(parts[-1][0], parts[-1][1]), is_greedy=True),
        Candidate(**figures(rival or "x", 0.5), is_greedy=False),
    ]
    return generation(*parts, candidates=candidates)


OURS = [
    answered([("plain", 0.1), (" text", 0.9)], "rival").to_html(title="title"),
    generation(("plain", 0.1), (" text", 0.9)).to_html(compared=[generation(("text", 0.9))]),
]
TAGS = {"strong"}.union(*({tag for tag, _ in Page(html).elements} for html in OURS))
assert not TAGS & {"script", "img", "svg", "iframe", "object", "embed", "form", "base", "link"}


@fuzz(40)
@given(ANSWERS, DRAWN_TEXTS, DRAWN_TEXTS)
@example([(MARKUP[0], 0.9)], MARKUP[1], MARKUP[0])
def test_html(parts: list[tuple[str, float]], rival: str, title: str) -> None:
    answer = answered(parts, rival)
    for html in (answer.to_html(title=title), answer._repr_html_(), answer.to_html(compared=[answer], title=title)):
        assert not CONTROLS.search(html)
        page = Page(html)
        assert {tag for tag, _ in page.elements} <= TAGS
        assert not page.comments
        for name, value in (pair for _, attributes in page.elements for pair in attributes.items()):
            assert not name.startswith("on")
            assert name not in ("href", "src", "action", "srcdoc")
            assert "javascript:" not in value or name in ("title", "aria-label")


def test_a_title_with_a_lone_surrogate_can_be_written() -> None:
    for format in ("html", "markdown", "svg"):
        assert b"U+D800" in answered([("text", 0.9)]).render(format, title="\ud800").encode()


PARSER = MarkdownIt("gfm-like", {"linkify": False, "html": True})


@fuzz(40)
@given(ANSWERS, DRAWN_TEXTS, DRAWN_TEXTS)
@example([("<script>alert(1)</script>\n\n<div>", 0.9)], "<!--", "<b>")
def test_markdown(parts: list[tuple[str, float]], rival: str, title: str) -> None:
    answer = answered(parts, rival)
    for text in (answer.to_markdown(), answer.render("markdown", title=title)):
        assert not CONTROLS.search(text)
        for block in PARSER.parse(text):
            if block.type == "html_block":  # those of the rendering itself
                assert re.fullmatch(r"(<details><summary>Details</summary>|</details>)\s*", block.content)
            assert block.type not in ("fence", "code_block", "blockquote_open", "hr")
            for child in block.children or ():
                assert child.type not in ("html_inline", "image", "link_open", "code_inline")


SGR = re.compile(r"\x1b\[[0-9;]*m")
"""What rich writes for colours: nothing else of a terminal's language may be there."""


@pytest.mark.slow
@fuzz(40)
@given(ANSWERS, DRAWN_TEXTS, st.booleans())
@example([(MARKUP[8], 0.9)], MARKUP[9], True)
def test_terminals(parts: list[tuple[str, float]], rival: str, table: bool) -> None:
    answer = answered(parts, rival)
    compared = report([answer, answered([("other", 0.2)])], table=table)
    for shown in (report([answer], table=table), compared, answer.to_rich()):
        text = SGR.sub("", drawn(shown, 100, color=True))
        assert not CONTROLS.search(text)
        assert "\x1b]8" not in text


def tags_of(picture: str) -> set[str]:
    assert not CONTROLS.search(picture)
    return {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(picture).iter()}


@fuzz(30)
@given(ANSWERS, DRAWN_TEXTS)
@example([("</text></svg><script>", 0.9)], "\x1b[2J\x00")
def test_pictures(parts: list[tuple[str, float]], title: str) -> None:
    allowed = {"svg", "style", "defs", "clipPath", "rect", "text", "g", "circle", "path"}
    assert tags_of(answered(parts).render("svg", title=title)) <= allowed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")  # missing from the font
@fuzz(5)
@given(ANSWERS)
@example([("$\\frac{1}{0}$ </text><script>\x00", 0.9)])
def test_plots(parts: list[tuple[str, float]]) -> None:
    buffer = io.StringIO()
    answered(parts).plot().savefig(buffer, format="svg", metadata={"Date": None})
    assert not tags_of(buffer.getvalue()) & {"script", "image", "a", "foreignObject"}


@fuzz(40)
@given(ANSWERS, DRAWN_TEXTS)
def test_json(parts: list[tuple[str, float]], rival: str) -> None:
    answer = answered(parts, rival)
    assert Generation.model_validate_json(answer.model_dump_json()) == answer
    text = json.dumps(risk_report(answer), allow_nan=False)
    assert "".join(span["text"] for span in json.loads(text)["spans"]) == answer.text


@fuzz(30)
@given(DRAWN_TEXTS, DRAWN_TEXTS, DRAWN_TEXTS)
@example("a | b\n| c |", "\x1b[2J", "\u202e")
@example("model", "1", "![x](https://example.org/x.png) [y](https://example.org)")
def test_tables_of_evaluations(name: str, cell: str, heading: str) -> None:
    lines = table([name, heading], [[name, f"**{cell}**"]], left=1)
    assert len(lines) == 3
    (start,) = [block for block in PARSER.parse("\n".join(lines)) if block.type == "table_open"]
    assert start
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="truecolor")
    for as_markdown in (True, False):
        show("\n".join([*lines, ""]), console, as_markdown=as_markdown)
    assert not CONTROLS.search(SGR.sub("", console.file.getvalue()))  # type: ignore[attr-defined]


@fuzz(30)
@given(DRAWN_TEXTS)
def test_notes_of_commands(capsys: pytest.CaptureFixture[str], text: str) -> None:
    print_note(text)
    assert not CONTROLS.search(capsys.readouterr().err)
