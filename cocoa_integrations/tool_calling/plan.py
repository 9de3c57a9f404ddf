"""How a request with tools or a schema becomes a prompt and a grammar, and how the answer is parsed and measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from cocoa_engine import CocoaEngine, Generation, GrammarProcessor, json_rule
from cocoa_engine.errors import IncompleteAnswerError
from cocoa_engine.integration import one_budget, safe_logger
from cocoa_engine.report import CallReport, RiskReport, ValueReport, finite, severity
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.options import (
    ChatTemplateOptions,
    ends_inside_reasoning,
    template_kwargs,
    with_blocks,
    with_reasoning,
)
from cocoa_integrations._shared.reasoning import (
    SPELLED,
    Mark,
    MarkedText,
    ReasoningSplitter,
    ReasoningTags,
    Split,
    split_generation,
)
from cocoa_integrations.tool_calling import formats
from cocoa_integrations.tool_calling.call_format import CallFormat
from cocoa_integrations.tool_calling.calls import Call, Reading
from cocoa_integrations.tool_calling.formats import HERMES, template_format, template_reasoning
from cocoa_integrations.tool_calling.grammar import after_reasoning, call_grammar
from cocoa_integrations.tool_calling.json_text import field_offsets, member_path
from cocoa_integrations.tool_calling.reading import end_of_answer, read, unread_call
from cocoa_integrations.tool_calling.request import ToolRequest
from cocoa_integrations.tool_calling.response_template import has_response_template, parsed_response
from cocoa_integrations.tool_calling.schemas import enforceable, enforceable_each, mismatch

logger = safe_logger(__name__)

ROOT = ("$.", "$[")
"""A key of ``arguments`` that begins so is the path of a value inside an argument; others are names of arguments."""


class Plan:
    """The prompt, the grammar and the parser for a request, which may be empty, with one engine.

    With ``calls_must_fit``, a call that does not fit the schema of its tool is an error. Otherwise it is invalid.
    :meth:`prompt` sets ``inside_reasoning``: whether the prompt ends inside the reasoning, as those for DeepSeek-R1 do.
    """

    def __init__(
        self,
        request: ToolRequest,
        engine: CocoaEngine,
        options: ChatTemplateOptions | None = None,
        *,
        calls_must_fit: bool = False,
    ) -> None:
        self.request = request
        self.engine = engine
        self.inside_reasoning = False
        self._options = ChatTemplateOptions() if options is None else options
        self._calls_must_fit = calls_must_fit

    @cached_property
    def _native(self) -> tuple[CallFormat | None, bool]:
        return template_format(self.engine)

    @property
    def style(self) -> CallFormat:
        return self._native[0] or HERMES

    @cached_property
    def _ends(self) -> dict[int, str]:
        """The tokens that end an answer with calls, by their ids."""
        if not self.request.tools:
            return {}
        tokenizer = self.engine.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        of_calls = [token_id for token_id, token in added.items() if token.content == self.style.end]
        return {token_id: tokenizer.decode([token_id]) for token_id in (*self.engine.end_token_ids, *of_calls)}

    @cached_property
    def inner_ends(self) -> dict[int, str]:
        """Those that stand before a call or in one, too."""
        return {token_id: text for token_id, text in self._ends.items() if text and self.style.goes_on_after(text)}

    @property
    def call_ends(self) -> list[int]:
        """The ids of the tokens that end an answer with calls, besides those that end any answer."""
        return [*self._ends.keys() - self.inner_ends.keys() - self.engine.end_token_ids]

    def is_over(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the inner ends ends the answer with these ids."""
        if self.inner_ends.keys().isdisjoint(token_ids):
            return False
        text = self.engine.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        reasoning, closing, _ = text.partition(self._tags.closing)
        return self._end(text, len(reasoning + closing) if closing else 0) is not None

    def _end(self, text: str, start: int) -> int | None:
        """The offset in a text with special tokens of the inner end that ends the answer."""
        if not self.inner_ends:
            return None
        names = [tool["function"]["name"] for tool in self.request.tools]
        return end_of_answer(text, self.style, names, self.inner_ends.values(), start)

    @cached_property
    def _tags(self) -> ReasoningTags:
        return template_reasoning(self.engine)

    @property
    def _is_parsed(self) -> bool:
        """Whether transformers parses the calls."""
        return self._native[0] is None and has_response_template(self.engine.tokenizer)

    @property
    def _texts(self) -> tuple[str, ...]:
        """Texts whose special tokens are parts of calls."""
        if not self.request.tools:
            return ()
        return tuple(self.engine.tokenizer.all_special_tokens) if self._is_parsed else self.style.texts()

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages for the ``chat`` method of the engine, and the arguments of the chat template.

        Messages are dicts with ``role`` and ``content``. Those of an assistant may have ``tool_calls`` (OpenAI's
        format, the arguments a dict) and ``reasoning_content``; those of a tool have ``name`` and ``tool_call_id``.
        """
        kwargs = template_kwargs(self._options, messages, self.engine)
        chat, request = with_reasoning(messages, self.engine, self._tags), self.request
        if request or any(message["role"] == "tool" or message.get("tool_calls") for message in chat):
            (native, described), texts = self._native, list[str]()
            if native is None:
                chat = formats.as_plain_text(chat)
            elif not native.several:
                chat = formats.one_call_each(chat, takes_text=native.takes_text)
            if native is not None and native.encoded:
                chat = formats.with_encoded_arguments(chat)
            if request.tools and described:
                kwargs["tools"] = [dict(tool) for tool in request.tools]
            elif request.tools:
                texts.append(formats.tools_text(request.tools, self.style))
            if request.schema is not None and request.described:
                texts.append(formats.SCHEMA.format(schema=json.dumps(request.schema, ensure_ascii=False)))
            if texts and chat:
                chat = formats.with_instructions(chat, "\n\n".join(texts), self.engine)
        if self._tags.is_block:
            chat = with_blocks(chat)
        self.inside_reasoning = ends_inside_reasoning(self.engine, chat, kwargs, self._tags)
        return chat, kwargs

    def splitter(self) -> ReasoningSplitter:
        return ReasoningSplitter(self.engine, inside=self.inside_reasoning, tags=self._tags, texts=self._texts)

    def split(self, generation: Generation) -> Split:
        inside, tags, texts = self.inside_reasoning, self._tags, self._texts
        return split_generation(generation, self.engine, inside=inside, tags=tags, texts=texts)

    @one_budget()
    def processors(
        self, chat: Sequence[Mapping[str, Any]] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[GrammarProcessor]:
        """The processor that constrains the answer to the prompt of ``chat``, after any reasoning, if there is one."""
        request = self.request
        if not request.enforced:
            return []
        window = self.engine.context_window if chat else None
        if window is not None and len(json.dumps([chat, kwargs], default=str)) > window:  # a token has a character
            self.engine.require_room(self.engine.encode_chat(chat, **(kwargs or {})))
        other = None if request.schema is None else json_rule(enforceable(request.schema))
        grammar = f"start: {other}"
        if request.tools:
            schemas = enforceable_each([function["parameters"] for function in request.callable_tools])
            foot = "".join(self._tags.feet) if self.inner_ends else ""
            grammar = call_grammar(self.style, request, schemas, self.engine.tokenizer, other, foot)
        if self.inside_reasoning:
            grammar = after_reasoning(grammar, self.engine.tokenizer, self._tags.closing)
        return [self.engine.constrain(grammar=grammar, ignored_ends=self.inner_ends)]

    @one_budget()
    def read(self, text: str, *, done: bool = True, start: int = 0, marks: Sequence[Mark] = ()) -> Reading:
        """The text and the calls of an answer, or of a part of it. What does not fit its schema is invalid.

        ``marks`` are the special tokens of the format in the answer, which decoding has removed.
        """
        request, marked = self.request, MarkedText(text, marks)
        is_parsed = bool(request.tools) and self._is_parsed
        if not is_parsed:
            opening, end = self.style.opening if request.tools else "", self._end(marked.text, start)
            rest = [] if end is None else [(end, len(marked.text), "")]
            marked.replace([*self._tags.hidden(marked.text[:end], start, opening, done=done), *rest])
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
        if not request.tools:
            reading = Reading(marked.text[start:], [])
        elif is_parsed and not done:
            reading = Reading("", [])
        else:
            several, meant = request.parallel is not False, request.schema is None
            parsed: Reading | None = None
            if is_parsed:
                place, tools = (start, len(text)), request.tools
                parsed = parsed_response(self.engine.tokenizer, marked.text[start:], tools, place)
            reading = parsed or read(
                marked.text, self.style, parameters, several=several, done=done, start=start, meant=meant
            )
            if done and meant and not reading.calls and (unread := unread_call(marked.text, [*parameters], start)):
                reading.calls.append(unread)
        reading = _without_marks(reading, marked, {name for _, name in marks})
        allowed = {function["name"] for function in request.callable_tools}
        for number, call in enumerate(reading.calls):
            if call.name in parameters.keys() - allowed:
                reading.calls[number] = replace(call, error=f"the request does not allow a call of {call.name}")
        if not done:
            return reading
        if request.schema is not None and request.checked and not reading.calls:
            error = mismatch(reading.content, request.schema)
            if error is not None:
                raise IncompleteAnswerError(f"the answer does not fit its schema: {error}")
        for number, call in enumerate(reading.calls):
            if call.error is None and call.name in parameters and (request.enforced or call.is_bare):
                error = mismatch(call.written, parameters[call.name])
                if error is not None and self._calls_must_fit and request.enforced:
                    raise IncompleteAnswerError(f"the call of {call.name} does not fit the schema of the tool: {error}")
                error = error and f"it does not fit the schema of the tool: {error}"
                reading.calls[number] = replace(call, error=error)
        for call in reading.calls:
            if call.error is not None:
                logger.warning("the answer calls %s, which is invalid: %s", call.name or "a tool", call.error)
        return reading


def _without_marks(reading: Reading, marked: MarkedText, names: set[str]) -> Reading:
    """What was read from a text with special tokens, with the places in the text without them."""
    is_spelled, names = SPELLED in names, names - {SPELLED}

    def plain(place: tuple[int, int]) -> tuple[int, int]:
        return marked.plain(place[0]), marked.plain(place[1])

    content = reading.content
    for name in names:
        content = content.replace(name, "")
    calls = [
        replace(call, offsets=plain(call.offsets), values={name: plain(place) for name, place in call.values.items()})
        for call in reading.calls
    ]
    if not is_spelled:
        return Reading(content, calls)
    for number, call in enumerate(calls):
        arguments = json.loads(json.dumps(call.arguments, ensure_ascii=False).replace(SPELLED, ""))
        values = {name.replace(SPELLED, ""): place for name, place in call.values.items()}
        calls[number] = replace(call, written=call.written.replace(SPELLED, ""), arguments=arguments, values=values)
    return Reading(content.replace(SPELLED, ""), calls)


def parts_of_report(generation: Generation, plan: Plan, split: Split, calls: Sequence[Call]) -> dict[str, Any]:
    """What the parsed answer adds to its report: ``tool_calls`` if it has calls, ``fields`` if JSON was asked for.

    An argument is listed by its name, every value in it by its path. For a value, ``risk`` is the highest risk of the
    spans that overlap it, ``con_mlds`` and ``f_mlds`` are means over these spans, and ``log_prob`` is the sum over the
    tokens of the value. Tokens that the grammar forces have log-probability 0. Offsets are those in the generated text.
    """
    if not calls and plan.request.schema is None:
        return {}
    text, tokens, position = generation.text, list[tuple[int, int, float]](), 0
    for entry in TokenLogprobs(plan.engine).of_answer(generation.spans):
        tokens.append((position, position + len(entry["token"]), entry["logprob"]))
        position = tokens[-1][1]

    def measured(start: int, end: int) -> ValueReport:
        spans = [(n, span) for n, span in enumerate(generation.spans) if span.start < end and span.end > start]
        risks = [severity(span.risk) for _, span in spans if span.risk is not None]
        count = max(1, len(spans))
        return ValueReport(
            risk=finite(max(risks, default=0.0)),
            con_mlds=finite(sum(span.con_mlds for _, span in spans) / count),
            f_mlds=finite(sum(span.f_mlds for _, span in spans) / count),
            log_prob=finite(sum(log_prob for first, last, log_prob in tokens if first < end and last > start)),
            start=start,
            end=end,
            spans=[number for number, _ in spans],
        )

    if not calls:
        return {"fields": {path: measured(*at) for path, at in field_offsets(text, split.answer_start).items()}}
    reports = []
    for call in calls:
        offsets = dict(call.values)
        for name, (start, _) in call.values.items():
            # arguments that were written as a string of JSON have no offsets of their own
            if isinstance((call.arguments or {}).get(name), (dict, list)) and text.startswith(("{", "["), start):
                offsets |= field_offsets(text, start, member_path("$", name))
        arguments = {name: measured(*at) for name, at in offsets.items()}
        risk = measured(*call.offsets).risk
        reports.append(CallReport(name=call.name, id=call.id, risk=risk, arguments=arguments, error=call.error))
    return {"tool_calls": reports}


def fields_of_report(report: RiskReport) -> dict[str, ValueReport]:
    """The risk of every field of a structured answer, by path: of a JSON answer, or of its first tool call."""
    if "fields" in report.model_fields_set:
        return report.fields
    for call in report.tool_calls:
        # in the order of the text, an object before the values in it
        arguments = sorted(call.arguments.items(), key=lambda each: (each[1].start, -each[1].end))
        return {name if name.startswith(ROOT) else member_path("$", name): value for name, value in arguments}
    return {}
