"""Answers of chat completions: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocoa_engine import Cancellation, CocoaConfig, Generation, SpanStream, Timeline
from cocoa_engine.errors import ConfigError, IncompleteAnswerError
from cocoa_engine.model.callables import Processor
from cocoa_integrations._shared.logprobs import TokenLogprobs, openai_logprobs
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.server.errors import of_parameter
from cocoa_integrations.server.protocol.risk_fields import RiskFields
from cocoa_integrations.tool_calling import Call, Plan, Reading, new_id, parts_of_report
from cocoa_integrations.tool_calling.streaming import CallDelta, GrowingAnswer, Piece

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "risk": "content_filter"}
"""OpenAI's finish reasons by those of the engine."""


@dataclass(frozen=True)
class Answered:
    """An answer, and its choice on the wire.

    Attributes:
        generation: the answer.
        split: separates its reasoning.
        choice: what the client gets. For a stream, its last chunk's.
        timeline: the phases of the call.
    """

    generation: Generation
    split: Split
    choice: dict[str, Any]
    timeline: Timeline

    @property
    def finish_reason(self) -> str:
        """The finish reason that the client gets."""
        return str(self.choice["finish_reason"])


@dataclass(frozen=True)
class ChatJob:
    """What the engine is asked for, ready to be run in a worker thread. Answers of one request share it.

    Attributes:
        plan: the tools, the grammar and the parser.
        messages: the messages for the chat template.
        options: the arguments of ``chat`` and ``stream_chat`` of the engine, without the settings.
        fields: how the risk is written.
    """

    plan: Plan
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    fields: RiskFields

    @classmethod
    def of(
        cls,
        plan: Plan,
        entries: Sequence[Mapping[str, Any]],
        processors: Sequence[Processor],
        fields: RiskFields,
        cancellation: Cancellation,
        source: Sequence[str] | None = None,
    ) -> ChatJob:
        """Render the prompt and compile the grammar.

        Args:
            plan: the tools, the grammar and the parser.
            entries: the messages.
            processors: logits processors of the request.
            fields: how the risk is written.
            cancellation: ends the work.
            source: the passages in the messages.

        Raises:
            CocoaError: see :class:`Plan`.
        """
        with of_parameter("messages"):
            messages, template_kwargs = plan.prompt(entries)
            with of_parameter(_schemas(plan), ConfigError):
                constraints = plan.processors(messages, template_kwargs)
        options = {
            "template_kwargs": template_kwargs,
            "logits_processor": [*processors, *constraints],
            "cancellation": cancellation,
            "source": source or None,
        }
        return cls(plan, messages, options, fields)

    def answer(self, index: int, config: CocoaConfig) -> Answered:
        """Decode one whole answer."""
        timeline = Timeline()
        with of_parameter("messages"):
            generation = self.plan.engine.chat(self.messages, config=config, timeline=timeline, **self.options)
        return self._answered(index, generation, timeline)

    def _answered(self, index: int, generation: Generation, timeline: Timeline) -> Answered:
        split = self.plan.split(generation)
        with of_parameter(_schemas(self.plan), IncompleteAnswerError):
            reading = self.plan.read(generation.text, start=split.answer_start)
        calls = [(new_id(), call) for call in reading.calls]
        report = self.report(generation, split, calls)
        tokens = openai_logprobs(generation.spans, self.plan.engine)["content"] if self.fields.logprobs else None
        named = [_tool_call(call_id, call) for call_id, call in calls if _is_sent(call)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reading.content + _unsent(reading, generation) or (None if named else ""),
            "refusal": None,
            **({"reasoning_content": split.reasoning} if split.reasoning else {}),
            **({"tool_calls": named} if named else {}),
            **self.fields.in_answer(report),
        }
        choice = {
            "index": index,
            "message": message,
            "logprobs": self.fields.logprobs_of(tokens, **{RISK_KEY: report}),
            "finish_reason": finish_reason(generation, reading),
        }
        return Answered(generation, split, choice, timeline)

    def report(self, generation: Generation, split: Split, calls: list[tuple[str, Call]]) -> dict[str, Any]:
        """The report of an answer; empty if none was asked for.

        Args:
            generation: the answer.
            split: separates its reasoning.
            calls: its tool calls, each with its id.
        """
        if not self.fields.reported:
            return {}
        parts = parts_of_report(generation, self.plan, split, calls)
        return self.fields.report(generation, split, **parts)


class ChatStream:
    """One streamed answer: the choices of its chunks, without their envelope.

    Iterating over :meth:`choices` decodes, in the thread that iterates.

    Args:
        job: what the engine is asked for.
        index: the number of the answer.
        config: the settings.

    Attributes:
        answered: the answer, once it is complete.
    """

    def __init__(self, job: ChatJob, index: int, config: CocoaConfig) -> None:
        self.answered: Answered | None = None
        self._job, self._index, self._config = job, index, config
        self._fields = job.fields
        self._stream: SpanStream | None = None
        self._ids: list[str] = []  # of the tool calls
        self._sent: dict[int, int] = {}  # the index of each call that is sent, by its number in the answer

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """The number of prompt tokens read so far, and the length of the prompt; ``None`` before it is known."""
        return None if self._stream is None else self._stream.prompt_progress

    def choices(self) -> Generator[list[dict[str, Any]], None, None]:
        """For each decided span, the choices of new chunks."""
        job, plan = self._job, self._job.plan
        growing = GrowingAnswer(plan)
        tokens = TokenLogprobs(plan.engine) if self._fields.logprobs else None
        role = [self._choice({"role": "assistant", "content": ""})]
        timeline = Timeline()
        with of_parameter("messages"):
            stream = plan.engine.stream_chat(job.messages, config=self._config, timeline=timeline, **job.options)
        with stream:
            self._stream = stream
            for span in stream:
                yield [*role, *self._chunks(growing.add(span), tokens)]
                role = []
        assert stream.generation is not None
        yield [*role, *self._last(stream.generation, growing, tokens, timeline)]

    def _chunks(self, pieces: Sequence[Piece], tokens: TokenLogprobs | None) -> list[dict[str, Any]]:
        """The choices of the pieces that add something."""
        made = [self._chunk(piece, tokens) for piece in pieces]
        return [one for one in made if one["delta"] or one["logprobs"]]

    def _chunk(self, piece: Piece, tokens: TokenLogprobs | None) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        listed = None
        if piece.span is not None and piece.number is not None:
            if self._fields.reported:
                entries = [self._fields.span(piece.span, piece.number, piece.part)]
            listed = None if tokens is None else tokens.of(piece.span)
        delta = {
            **({"content": piece.content} if piece.content else {}),
            **({"reasoning_content": piece.reasoning} if piece.reasoning else {}),
            **({"tool_calls": calls} if (calls := self._calls(piece.calls)) else {}),
            **self._fields.in_delta(entries),
        }
        logprobs = self._fields.logprobs_of(listed, **{SPANS_KEY: entries}) if piece.span is not None else None
        return self._choice(delta, logprobs)

    def _last(
        self, generation: Generation, growing: GrowingAnswer, tokens: TokenLogprobs | None, timeline: Timeline
    ) -> list[dict[str, Any]]:
        """The chunks after the last span: what was held back, and the report."""
        plan = self._job.plan
        with of_parameter(_schemas(plan), IncompleteAnswerError):
            [*held, rest], reading = growing.finish()
        sent = [delta for delta in rest.calls if _is_sent(reading.calls[delta.number])]
        whole = Piece(None, None, None, rest.reasoning, rest.content + _unsent(reading, generation), sent)
        chunks = self._chunks([*held, whole], tokens)
        split = plan.split(generation)
        calls = [(self._id(number), call) for number, call in enumerate(reading.calls)]
        report = self._job.report(generation, split, calls)
        last = self._choice(self._fields.in_answer(report), self._fields.logprobs_of(None, **{RISK_KEY: report}))
        last["finish_reason"] = finish_reason(generation, reading)
        self.answered = Answered(generation, split, last, timeline)
        return [*chunks, last]

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _calls(self, deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
        """The new parts of calls. Only the first part of a call has its id, its type and its name."""
        parts: list[dict[str, Any]] = []
        for delta in deltas:
            index = self._sent.setdefault(delta.number, len(self._sent))
            function = (
                {"arguments": delta.written} if delta.name is None else {"name": delta.name, "arguments": delta.written}
            )
            begins = {} if delta.name is None else {"id": self._id(delta.number), "type": "function"}
            if begins or delta.written:
                parts.append({"index": index, **begins, "function": function})
        return parts

    def _id(self, number: int) -> str:
        while len(self._ids) <= number:
            self._ids.append(new_id())
        return self._ids[number]


def _schemas(plan: Plan) -> str:
    """The parameter of the request that has the schemas."""
    return "response_format" if plan.request.schema is not None else "tools"


def finish_reason(generation: Generation, reading: Reading) -> str:
    """OpenAI's finish reason of an answer."""
    reason = FINISH_REASONS[generation.finish_reason or "stop"]
    return "tool_calls" if reason == "stop" and any(map(_is_sent, reading.calls)) else reason


def _tool_call(call_id: str, call: Call) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.written}}


def _is_sent(call: Call) -> bool:
    """Whether a message has a call. Others have no name, or are complete and not allowed: a client would run them."""
    return call.name is not None and (call.error is None or call.arguments is None)


def _unsent(reading: Reading, generation: Generation) -> str:
    """The text of the other calls, which is part of the content."""
    return "".join(generation.text[slice(*call.offsets)] for call in reading.calls if not _is_sent(call))
