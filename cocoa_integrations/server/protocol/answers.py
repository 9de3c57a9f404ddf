"""Answers of chat completions and of completions: whole ones, and the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Timeline, Usage
from cocoa_engine.errors import ConfigError, IncompleteAnswerError, PromptError
from cocoa_engine.report import RISK_KEY, SPANS_KEY, RiskReport, finite
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece
from cocoa_integrations.chat_service.local import LocalStream, PreparedCall
from cocoa_integrations.server.errors import of_parameter
from cocoa_integrations.server.protocol.decoding import CocoaOptions
from cocoa_integrations.tool_calling import Call, CallDelta

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "risk": "content_filter"}
"""OpenAI's finish reasons by those of the engine."""

_MOST_LOGITS = 2**28
"""Above this number of logits, one GiB in float32, a text is read in several forward passes."""

Entries = list[dict[str, Any]]
Choice = dict[str, Any]


@dataclass(frozen=True)
class RiskFields:
    """Where an answer has its risk: in ``cocoa_risk`` and ``cocoa_spans``, and in OpenAI's ``logprobs``.

    Attributes:
        in_message: whether it is in the message, or in the deltas of a stream.
        in_logprobs: whether it is in ``logprobs``.
        logprobs: ``logprobs`` of the request.
    """

    in_message: bool = True
    in_logprobs: bool = False
    logprobs: bool | None = None

    @classmethod
    def of(cls, options: CocoaOptions, logprobs: bool | None, *, allow_logprobs: bool = True) -> RiskFields:
        """Read it off a request.

        Args:
            options: the object ``cocoa``.
            logprobs: ``logprobs`` of the request. An explicit ``False`` asks for `None`.
            allow_logprobs: whether the server writes risk into ``logprobs``.
        """
        return cls(
            in_message=options.report in ("both", "message"),
            in_logprobs=options.report in ("both", "logprobs") and logprobs is not False and allow_logprobs,
            logprobs=logprobs,
        )

    @property
    def reported(self) -> bool:
        """Whether the answer has its risk anywhere."""
        return self.in_message or self.in_logprobs

    def entries(self, piece: Piece) -> Entries:
        """``cocoa_spans`` of a chunk."""
        entry = piece.entry if self.reported else None
        return [] if entry is None else [entry.with_values(index=entry.span).to_dict()]

    def report(self, answer: Answer) -> dict[str, Any]:
        """``cocoa_risk`` of an answer; empty if none was asked for."""
        if not self.reported or answer.answered is None or answer.report is None:
            return {}
        return wire_report(answer.report, finish_reason=answer.finish_reason, verdict=answer.answered.verdict)

    def in_delta(self, entries: Entries) -> dict[str, Any]:
        """The part of a ``delta`` with new spans."""
        return {SPANS_KEY: entries} if self.in_message and entries else {}

    def in_answer(self, report: dict[str, Any]) -> dict[str, Any]:
        """The part of a ``message``, or of the last ``delta``, with the report."""
        return {RISK_KEY: report} if self.in_message else {}

    def logprobs_of(self, tokens: Entries | None, **risk: Any) -> dict[str, Any] | None:
        """``logprobs`` of a choice in a chat.

        Args:
            tokens: the entries of the tokens, if they were asked for.
            **risk: ``cocoa_risk`` or ``cocoa_spans``.
        """
        if not (self.logprobs or self.in_logprobs):
            return None
        return {"content": tokens, "refusal": None, **(risk if self.in_logprobs else {})}


@dataclass(frozen=True)
class Answered:
    """An answer, and its choice on the wire: that of the last chunk for a stream."""

    answer: Answer
    choice: Choice

    @property
    def generation(self) -> Generation:
        """The answer as the engine returned it."""
        assert self.answer.generation is not None
        return self.answer.generation

    @property
    def split(self) -> Split:
        """Separates its reasoning."""
        assert self.answer.split is not None
        return self.answer.split

    @property
    def timeline(self) -> Timeline:
        """The phases of the call."""
        return self.answer.timeline or Timeline()

    @property
    def finish_reason(self) -> str:
        """The finish reason that the client gets."""
        return str(self.choice["finish_reason"])


@dataclass
class Job(ABC):
    """The answers to one prompt, which are decoded in worker threads. Renders the prompt and compiles the grammar.

    Attributes:
        engine: the engine.
        call: the prompt, and how it is answered.
        fields: how the risk is written.
        first: the index of its first answer among all choices.
    """

    engine: CocoaEngine
    call: ChatCall
    fields: RiskFields
    first: int = 0

    def __post_init__(self) -> None:
        with self.named():
            self.prepared = PreparedCall(self.engine, self.call)
            with of_parameter(self._schemas, ConfigError):
                assert self.prepared.options  # compiles the grammar

    @property
    def _schemas(self) -> str:
        """The parameter of the request that has the schemas."""
        return "tools" if self.call.tools.schema is None else "response_format"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the parameter of the request in errors of the prompt and of schemas."""
        prompt = "prompt" if self.call.messages is None else "messages"
        with of_parameter(self._schemas, IncompleteAnswerError), of_parameter(prompt):
            yield

    def answer(self, number: int, config: CocoaConfig) -> Answered:
        """Decode one whole answer.

        Args:
            number: the number of the answer among those to this prompt.
            config: its settings.
        """
        with self.named():
            return self.whole(number, self.prepared.answer(config))

    @abstractmethod
    def whole(self, number: int, answer: Answer) -> Answered:
        """The choice of an answer in one piece."""

    @abstractmethod
    def writer(self, number: int) -> Writer:
        """Writes the chunks of an answer."""


class Writer(ABC):
    """Writes the chunks of one answer."""

    @abstractmethod
    def opening(self) -> list[Choice]:
        """The choices before the first span."""

    @abstractmethod
    def chunks(self, pieces: Sequence[Piece]) -> list[Choice]:
        """The choices of the pieces that add something."""

    @abstractmethod
    def end(self, answer: Answer) -> list[Choice]:
        """The choices after the last span. The last one has the report."""


class StreamedAnswer:
    """One answer that is decoded while its choices are read.

    Args:
        job: what the engine is asked for.
        number: the number of the answer among those to its prompt.
        config: its settings.

    Attributes:
        answered: the answer, once it is complete.
    """

    def __init__(self, job: Job, number: int, config: CocoaConfig) -> None:
        self.answered: Answered | None = None
        self._job, self._number = job, number
        self._stream = LocalStream(lambda: job.prepared, config)

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """The number of prompt tokens read so far, and the length of the prompt; ``None`` before it is known."""
        return self._stream.prompt_progress

    def choices(self) -> Generator[list[Choice], None, None]:
        """For each decided span, the choices of new chunks."""
        with self._job.named(), closing(self._stream) as stream:
            writer = self._job.writer(self._number)
            opening = writer.opening()
            for pieces in stream:
                yield [*opening, *writer.chunks(pieces)]
                opening = []
            ending = writer.end(stream.answer)
            self.answered = Answered(stream.answer, ending[-1])
            yield [*opening, *ending]


class ChatJob(Job):
    """The answers to one conversation."""

    def whole(self, number: int, answer: Answer) -> Answered:
        """The choice of an answer in one piece."""
        report = self.fields.report(answer)
        calls = [_tool_call(call) for call in answer.calls if _is_sent(call)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content + _unsent(answer) or (None if calls else ""),
            "refusal": None,
            **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
            **self.fields.in_answer(report),
        }
        choice = {
            "index": self.first + number,
            "message": message,
            "logprobs": self.fields.logprobs_of(answer.logprobs, **{RISK_KEY: report}),
            "finish_reason": finish_reason(answer),
        }
        return Answered(answer, choice)

    def writer(self, number: int) -> Writer:
        """Writes the chunks of an answer."""
        return _ChatWriter(self.fields, self.first + number)


class _ChatWriter(Writer):
    def __init__(self, fields: RiskFields, index: int) -> None:
        self._fields, self._index = fields, index
        self._sent: dict[int, int] = {}  # the index of each call that is sent, by its number in the answer

    def opening(self) -> list[Choice]:
        return [self._choice({"role": "assistant", "content": ""})]

    def chunks(self, pieces: Sequence[Piece]) -> list[Choice]:
        choices = []
        for piece in pieces:
            entries = self._fields.entries(piece)
            delta = {
                **({"content": piece.content} if piece.content else {}),
                **({"reasoning_content": piece.reasoning} if piece.reasoning else {}),
                **({"tool_calls": calls} if (calls := self._calls(piece.calls)) else {}),
                **self._fields.in_delta(entries),
            }
            logprobs = None
            if piece.entry is not None:
                logprobs = self._fields.logprobs_of(piece.logprobs, **{SPANS_KEY: entries})
            if delta or logprobs:
                choices.append(self._choice(delta, logprobs))
        return choices

    def end(self, answer: Answer) -> list[Choice]:
        rest = answer.rest
        sent = [delta for delta in rest.calls if _is_sent(answer.calls[delta.number])]
        chunks = self.chunks([Piece(None, rest.content + _unsent(answer), rest.reasoning, sent)])
        report = self._fields.report(answer)
        last = self._choice(self._fields.in_answer(report), self._fields.logprobs_of(None, **{RISK_KEY: report}))
        return [*chunks, {**last, "finish_reason": finish_reason(answer)}]

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> Choice:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _calls(self, deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
        """The new parts of calls. Only the first part of a call has its id, its type and its name."""
        parts: list[dict[str, Any]] = []
        for delta in deltas:
            index = self._sent.setdefault(delta.number, len(self._sent))
            if delta.name is not None:
                function = {"name": delta.name, "arguments": delta.written}
                parts.append({"index": index, "id": delta.id, "type": "function", "function": function})
            elif delta.written:
                parts.append({"index": index, "function": {"arguments": delta.written}})
        return parts


@dataclass
class CompletionJob(Job):
    """The answers to one prompt.

    Attributes:
        logprobs: the number of most probable tokens that are listed for each token; ``None`` lists no tokens.
        echo: whether answers begin with the prompt.
        only_echo: whether nothing is decoded.
    """

    logprobs: int | None = None
    echo: bool = False
    only_echo: bool = False
    _echoed: tuple[str, Entries] | None = field(default=None, init=False)

    @property
    def echoed(self) -> tuple[str, Entries]:
        """The prompt's text as answers begin with it, and the entries of its tokens, if they are listed."""
        if self._echoed is None:
            self._echoed = self._read_prompt() if self.echo else ("", [])
        return self._echoed

    def _read_prompt(self) -> tuple[str, Entries]:
        """See :attr:`echoed`. The prompt is read in one forward pass.

        Raises:
            PromptError: the prompt is too long, or has unknown token ids.
        """
        ids, prompt, cancellation = self.prepared.token_ids, self.call.prompt, self.call.cancellation
        if wrong := [token_id for token_id in ids if not 0 <= token_id < len(self.engine.tokenizer)]:
            raise PromptError(f"token id {wrong[0]} is outside the vocabulary of {len(self.engine.tokenizer)}.")
        text = prompt if isinstance(prompt, str) else self.engine.decode(ids)
        if self.logprobs is None:
            return text, []
        if cancellation is not None:
            cancellation.check()
        tokens = TokenLogprobs(self.engine, special=True)
        entries = [tokens.token(ids[0], None)]
        if len(ids) > 1:
            config = CocoaConfig(method="greedy", top_logprobs=self.logprobs)
            options = {"config": config, "cancellation": cancellation}
            (span,) = score_one(self.engine.without_calibrator(), ids[:1], ids[1:], **options).spans
            rivals = span.top_log_probs or [[]] * len(span.token_ids)
            for each in zip(span.token_ids, span.token_log_probs, rivals, strict=True):
                entries.append(tokens.token(*each))
        return text, entries

    def answer(self, number: int, config: CocoaConfig) -> Answered:
        """Decode one whole answer, or give the prompt alone; see :meth:`Job.answer`."""
        with self.named():
            _ = self.echoed
            if not self.only_echo:
                return super().answer(number, config)
            usage = Usage(prompt_tokens=len(self.prepared.token_ids), completion_tokens=0)
            nothing = Generation(text="", token_ids=[], spans=[], finish_reason="length", usage=usage, config=config)
            return self.whole(number, self.prepared.made(nothing))

    def whole(self, number: int, answer: Answer) -> Answered:
        """The choice of an answer in one piece."""
        text, entries = self.echoed
        report = {} if self.only_echo else self.fields.report(answer)
        listed = None if self.logprobs is None else token_lists([*entries, *(answer.logprobs or ())])
        choice = {
            **self.choice(number, text + answer.text, listed, RISK_KEY, report),
            "finish_reason": FINISH_REASONS[answer.finish_reason or "stop"],
            **({} if self.only_echo else self.fields.in_answer(report)),
        }
        return Answered(answer, choice)

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, key: str, risk: Any) -> Choice:
        """A choice, or that of a chunk; ``risk`` is added to ``logprobs`` under ``key``."""
        if logprobs is not None and self.fields.in_logprobs and risk:
            logprobs = {**logprobs, key: risk}
        return {"index": self.first + number, "text": text, "logprobs": logprobs, "finish_reason": None}

    def writer(self, number: int) -> Writer:
        """Writes the chunks of an answer."""
        return _CompletionWriter(self, number)


class _CompletionWriter(Writer):
    def __init__(self, job: CompletionJob, number: int) -> None:
        self._job, self._number = job, number
        self._end = 0  # characters of the text so far

    def opening(self) -> list[Choice]:
        return [self._chunk(*self._job.echoed)] if self._job.echo else []

    def chunks(self, pieces: Sequence[Piece]) -> list[Choice]:
        fields = self._job.fields
        return [
            {**self._chunk(piece.content, piece.logprobs or [], risks), **fields.in_delta(risks)}
            for piece in pieces
            for risks in [fields.entries(piece)]
            if piece.entry is not None
        ]

    def end(self, answer: Answer) -> list[Choice]:
        report = self._job.fields.report(answer)
        last = {
            **self._job.choice(self._number, "", self._listed([]), RISK_KEY, report),
            "finish_reason": FINISH_REASONS[answer.finish_reason or "stop"],
            **self._job.fields.in_answer(report),
        }
        return [last]

    def _chunk(self, text: str, entries: Entries, risks: Sequence[Any] = ()) -> Choice:
        chunk = self._job.choice(self._number, text, self._listed(entries), SPANS_KEY, risks)
        self._end += len(text)
        return chunk

    def _listed(self, entries: Entries) -> dict[str, Any] | None:
        return None if self._job.logprobs is None else token_lists(entries, self._end)


class Echo(StreamedAnswer):
    """The prompt alone, as a stream of one chunk."""

    def choices(self) -> Generator[list[Choice], None, None]:
        """The choice of the chunk."""
        self.answered = self._job.answer(self._number, self._job.call.config)
        yield [self.answered.choice]


def score_one(engine: CocoaEngine, prompt: str | list[int], text: str | list[int], **options: Any) -> Generation:
    """Score one text, in one forward pass, or in several if the logits would need much memory."""
    # a text has at most about as many tokens as characters
    if (len(text) + 1) * engine.info().vocab_size > _MOST_LOGITS and not options.get("divide"):
        texts: Any = [text]
        scored: list[Generation] = engine.score(prompt, texts, **options)
        return scored[0]
    return engine.score(prompt, text, **options)


def token_lists(entries: Sequence[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """``logprobs`` of a completion, from entries as chat completions have them.

    Args:
        entries: the tokens; special tokens are not part of the text.
        offset: the offset of the first token in the text.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"]) if entry["bytes"] is not None else 0
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(entry: dict[str, Any]) -> dict[str, float] | None:
    """Log-probabilities by the texts of the tokens: of the most probable ones, and of the token itself."""
    if entry["logprob"] is None:
        return None
    log_probs: dict[str, float] = {}
    for rival in [*entry["top_logprobs"], entry]:
        log_probs.setdefault(rival["token"], rival["logprob"])  # of tokens with the same text, the most probable one
    return log_probs


def wire_report(report: RiskReport, **more: Any) -> dict[str, Any]:
    """A report on the wire, with further keys; clients join lists of spans by their ``index``."""
    spans = [span.with_values(index=span.span) for span in report.spans]
    return report.with_values(**more, spans=spans).to_dict()


def usage_of(answers: Sequence[Answered], fields: RiskFields, *, n: int | None = None) -> dict[str, Any]:
    """The token counts of the answers to one request.

    Args:
        answers: the answers.
        fields: how the risk is written.
        n: the number of answers to each prompt, which counts once. By default, all answer the same prompt.
    """
    of_prompts = [answered.answer.usage for answered in answers[:: n or len(answers)]]
    prompt = sum(usage.prompt_tokens for usage in of_prompts)
    completion = sum(answered.answer.usage.completion_tokens for answered in answers)
    details: dict[str, Any] = {"reasoning_tokens": sum(one.answer.reasoning_tokens or 0 for one in answers)}
    if fields.reported and (risk := max_risk_of([answered.split.answered for answered in answers])) is not None:
        details["cocoa_max_risk"] = risk
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in of_prompts)},
        "completion_tokens_details": details,
    }


def max_risk_of(answers: Sequence[Generation]) -> float | None:
    """The highest risk of all answers; ``None`` if one is not a finite number."""
    risks = [finite(answer.max_risk) for answer in answers]
    known = [risk for risk in risks if risk is not None]
    return max(known) if known and len(known) == len(risks) else None


def finish_reason(answer: Answer) -> str:
    """OpenAI's finish reason of an answer to a conversation."""
    reason = FINISH_REASONS[answer.finish_reason or "stop"]
    return "tool_calls" if reason == "stop" and any(map(_is_sent, answer.calls)) else reason


def _tool_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.written}}


def _is_sent(call: Call) -> bool:
    """Whether a message has a call. Others have no name, or are complete and not allowed: a client would run them."""
    return call.name is not None and (call.error is None or call.arguments is None)


def _unsent(answer: Answer) -> str:
    """The text of the other calls, which is part of the content."""
    return "".join(call.text for call in answer.calls if not _is_sent(call))
