"""Answers of chat completions and of completions: whole ones, and the chunks of a stream."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cocoa_engine import Cancellation, CocoaConfig, CocoaEngine, Generation, Usage
from cocoa_engine.errors import ConfigError, IncompleteAnswerError, PromptError
from cocoa_engine.report import RISK_KEY, SPANS_KEY, RiskReport, finite
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece
from cocoa_integrations.chat_service.local import LocalStream, PreparedCall
from cocoa_integrations.server.errors import of_parameter
from cocoa_integrations.tool_calling import Call

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "risk": "content_filter", None: "stop"}
"""OpenAI's finish reasons by those of the engine."""

_MOST_LOGITS = 2**28
"""Above this number of logits, one GiB in float32, a text is read in several forward passes."""

Entries = list[dict[str, Any]]
Choice = dict[str, Any]
Answered = tuple[Answer, Choice]
"""An answer, and its choice on the wire: that of the last chunk for a stream."""


class RiskFields(NamedTuple):
    """Where an answer has its risk: in the message or the deltas of a stream, and in OpenAI's ``logprobs``."""

    in_message: bool
    in_logprobs: bool

    def entries(self, piece: Piece) -> Entries:
        """``cocoa_spans`` of a chunk."""
        entry = piece.entry if any(self) else None
        return [] if entry is None else [entry.with_values(index=entry.span).to_dict()]

    def report(self, answer: Answer) -> dict[str, Any]:
        """``cocoa_risk`` of an answer; empty if none was asked for."""
        if not any(self) or answer.answered is None or answer.report is None:
            return {}
        return wire_report(answer.report, finish_reason=answer.finish_reason, verdict=answer.answered.verdict)

    def shown(self, key: str, risk: Any) -> dict[str, Any]:
        """The part of a message or a delta with a report or with new spans."""
        return {key: risk} if self.in_message and risk else {}


@dataclass
class Job:
    """The answers to one prompt, which are decoded in worker threads. Renders the prompt and compiles the grammar.

    ``first`` is the index of its first answer among all choices. With ``lists_invalid``, all calls of a chat are among
    its ``tool_calls``. Of a completion, ``top`` is the number of most probable tokens that are listed for each token,
    if any are; with ``echo`` answers begin with the prompt, and with ``only_echo`` nothing is decoded.
    """

    engine: CocoaEngine
    call: ChatCall
    risk: RiskFields
    first: int = 0
    lists_invalid: bool = False
    top: int | None = None
    echo: bool = False
    only_echo: bool = False
    _echoed: tuple[str, Entries] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._prompt = "prompt" if self.call.messages is None else "messages"
        self._schemas = "tools" if self.call.tools.schema is None else "response_format"
        with self.named():
            self.prepared = PreparedCall(self.engine, self.call)
            with of_parameter(self._schemas, ConfigError):
                assert self.prepared.options  # compiles the grammar

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the parameter of the request in errors of the prompt and of schemas."""
        with of_parameter(self._schemas, IncompleteAnswerError), of_parameter(self._prompt):
            yield

    def writer(self, number: int) -> "ChatWriter | CompletionWriter":
        """Writes one of the answers."""
        return (CompletionWriter if self.call.messages is None else ChatWriter)(self, self.first + number)

    def answer(self, number: int, config: CocoaConfig) -> Answered:
        """One whole answer: the one with this number among those to this prompt, with these settings."""
        with self.named():
            assert self.echoed  # before the answer is decoded
            if self.only_echo:
                usage = Usage(prompt_tokens=len(self.prepared.token_ids), completion_tokens=0)
                made: dict[str, Any] = {"text": "", "token_ids": [], "spans": [], "finish_reason": "length"}
                answer = self.prepared.made(Generation(**made, usage=usage, config=config))
            else:
                answer = self.prepared.answer(config)
            return answer, self.writer(number).whole(answer)

    @property
    def echoed(self) -> tuple[str, Entries]:
        """The prompt's text as answers begin with it, and the entries of its tokens, if they are listed.

        The prompt is read in one forward pass. Raises :class:`PromptError` if it is too long, or has unknown token ids.
        """
        if not self.echo or self._echoed is not None:
            return self._echoed or ("", [])
        ids, prompt, cancellation = self.prepared.token_ids, self.call.prompt, self.call.cancellation
        if wrong := [token_id for token_id in ids if not 0 <= token_id < len(self.engine.tokenizer)]:
            raise PromptError(f"token id {wrong[0]} is outside the vocabulary of {len(self.engine.tokenizer)}.")
        text, entries = prompt if isinstance(prompt, str) else self.engine.decode(ids), []
        if self.top is not None:
            if cancellation is not None:
                cancellation.check()
            tokens = TokenLogprobs(self.engine, special=True)
            entries.append(tokens.token(ids[0], None))
            if len(ids) > 1:
                options = {"config": CocoaConfig(method="greedy", top_logprobs=self.top), "cancellation": cancellation}
                (span,) = score_one(self.engine.without_calibrator(), ids[:1], ids[1:], **options).spans
                rivals = span.top_log_probs or [[]] * len(span.token_ids)
                entries += map(tokens.token, span.token_ids, span.token_log_probs, rivals)
        self._echoed = text, entries
        return self._echoed


class StreamedAnswer:
    """One answer that is decoded while its choices are read; see :meth:`Job.answer`. Then it is ``answered``."""

    def __init__(self, job: Job, number: int, config: CocoaConfig) -> None:
        self.answered: Answered | None = None
        self._job, self._number, self._config = job, number, config
        self.stream = LocalStream(job.engine, lambda: job.prepared, job.call.cancellation or Cancellation(), config)

    def choices(self) -> Generator[list[Choice], None, None]:
        """For each decided span, the choices of new chunks. The last one has the report."""
        if self._job.only_echo:
            self.answered = self._job.answer(self._number, self._config)
            yield [self.answered[1]]
            return
        with self._job.named(), closing(self.stream) as stream:
            writer = self._job.writer(self._number)
            opening = writer.opening()
            for pieces in stream:
                yield [*opening, *writer.chunks(pieces)]
                opening = []
            ending = writer.end(stream.answer)
            self.answered = stream.answer, ending[-1]
            yield [*opening, *ending]


class ChatWriter:
    """Writes an answer to a conversation."""

    def __init__(self, job: Job, index: int) -> None:
        self._risk, self._lists_tokens, self._index = job.risk, job.call.logprobs, index
        self._lists_invalid = job.lists_invalid
        self._sent: dict[int, int] = {}  # the index of each call that is sent, by its number in the answer

    def whole(self, answer: Answer) -> Choice:
        """The choice of an answer in one piece."""
        report = self._risk.report(answer)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.written}}
            for call in answer.calls
            if self._is_sent(call)
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content + self._unsent(answer) or (None if calls else ""),
            "refusal": None,
            **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
            **self._risk.shown(RISK_KEY, report),
        }
        logprobs = self._logprobs(answer.logprobs, RISK_KEY, report)
        reason = self._finish_reason(answer)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> list[Choice]:
        """The choices before the first span."""
        return [self._choice({"role": "assistant", "content": ""})]

    def chunks(self, pieces: Sequence[Piece]) -> list[Choice]:
        """The choices of the pieces that add something."""
        choices = []
        for piece in pieces:
            entries, calls = self._risk.entries(piece), []
            for delta in piece.calls:  # only the first part of a call has its id, its type and its name
                part: dict[str, Any] = {"index": self._sent.setdefault(delta.number, len(self._sent))}
                if delta.id is not None:
                    part |= {"id": delta.id, "type": "function", "function": {"name": delta.name}}
                if delta.id is not None or delta.written:
                    calls.append({**part, "function": {**part.get("function", {}), "arguments": delta.written}})
            delta_of_piece = {
                **({"content": piece.content} if piece.content else {}),
                **({"reasoning_content": piece.reasoning} if piece.reasoning else {}),
                **({"tool_calls": calls} if calls else {}),
                **self._risk.shown(SPANS_KEY, entries),
            }
            logprobs = None if piece.entry is None else self._logprobs(piece.logprobs, SPANS_KEY, entries)
            if delta_of_piece or logprobs:
                choices.append(self._choice(delta_of_piece, logprobs))
        return choices

    def end(self, answer: Answer) -> list[Choice]:
        """The choices after the last span. The last one has the report."""
        rest = answer.rest
        sent = [delta for delta in rest.calls if self._is_sent(answer.calls[delta.number])]
        chunks = self.chunks([Piece(None, rest.content + self._unsent(answer), rest.reasoning, sent)])
        report = self._risk.report(answer)
        last = self._choice(self._risk.shown(RISK_KEY, report), self._logprobs(None, RISK_KEY, report))
        return [*chunks, {**last, "finish_reason": self._finish_reason(answer)}]

    def _is_sent(self, call: Call) -> bool:
        """Whether a message has a call. Others have no name, or are not allowed, and a client would run them."""
        return self._lists_invalid or (call.name is not None and (call.error is None or call.arguments is None))

    def _unsent(self, answer: Answer) -> str:
        """The text of the other calls, which is part of the content."""
        return "".join(call.text for call in answer.calls if not self._is_sent(call))

    def _finish_reason(self, answer: Answer) -> str:
        """OpenAI's finish reason of an answer to a conversation."""
        reason = FINISH_REASONS[answer.finish_reason]
        return "tool_calls" if reason == "stop" and any(map(self._is_sent, answer.calls)) else reason

    def _choice(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> Choice:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: Entries | None, key: str, risk: Any) -> dict[str, Any] | None:
        """``logprobs`` of a choice: the entries of the tokens, and a report or new spans."""
        if not (self._lists_tokens or self._risk.in_logprobs):
            return None
        return {"content": tokens, "refusal": None, **({key: risk} if self._risk.in_logprobs else {})}


class CompletionWriter:
    """Writes an answer to a prompt."""

    def __init__(self, job: Job, index: int) -> None:
        self._job, self._risk, self._index = job, job.risk, index
        self._end = 0  # characters of the text so far

    def whole(self, answer: Answer) -> Choice:
        """The choice of an answer in one piece."""
        text, entries = self._job.echoed
        return self._last(answer, text + answer.text, [*entries, *(answer.logprobs or ())])

    def opening(self) -> list[Choice]:
        """The choices before the first span: the echo."""
        return [self._choice(*self._job.echoed)] if self._job.echo else []

    def chunks(self, pieces: Sequence[Piece]) -> list[Choice]:
        """The choices of the pieces that add something."""
        return [
            self._choice(piece.content, piece.logprobs or [], SPANS_KEY, self._risk.entries(piece))
            for piece in pieces
            if piece.entry is not None
        ]

    def end(self, answer: Answer) -> list[Choice]:
        """The choice after the last span, which has the report."""
        return [self._last(answer, "", [])]

    def _last(self, answer: Answer, text: str, tokens: Entries) -> Choice:
        report = {} if self._job.only_echo else self._risk.report(answer)
        choice = self._choice(text, tokens, RISK_KEY, report)
        return {**choice, "finish_reason": FINISH_REASONS[answer.finish_reason]}

    def _choice(self, text: str, tokens: Entries, key: str = "", risk: Any = None) -> Choice:
        """A choice, or that of a chunk, with ``risk`` under ``key``."""
        logprobs = None if self._job.top is None else token_lists(tokens, self._end)
        if logprobs is not None and self._risk.in_logprobs and risk:
            logprobs[key] = risk
        self._end += len(text)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return {**choice, **self._risk.shown(key, risk)}


def score_one(engine: CocoaEngine, prompt: str | list[int], text: str | list[int], **options: Any) -> Generation:
    """Score one text, in one forward pass, or in several if the logits would need much memory."""
    # a text has at most about as many tokens as characters
    if (len(text) + 1) * engine.info().vocab_size > _MOST_LOGITS and not options.get("divide"):
        texts: Any = [text]
        scored: list[Generation] = engine.score(prompt, texts, **options)
        return scored[0]
    return engine.score(prompt, text, **options)


def token_lists(entries: Sequence[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """``logprobs`` of a completion, from entries as chats have them; ``offset`` is that of the first token."""
    offsets: list[int] = []
    likely: list[dict[str, float] | None] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"]) if entry["bytes"] is not None else 0
        log_probs: dict[str, float] = {}
        for rival in [*entry["top_logprobs"], entry]:
            log_probs.setdefault(rival["token"], rival["logprob"])  # of tokens with the same text, the most probable
        likely.append(None if entry["logprob"] is None else log_probs)
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": likely,
        "text_offset": offsets,
    }


def wire_report(report: RiskReport, **more: Any) -> dict[str, Any]:
    """A report on the wire, with further keys; clients join lists of spans by their ``index``."""
    spans = [span.with_values(index=span.span) for span in report.spans]
    return report.with_values(**more, spans=spans).to_dict()


def usage_of(answers: Sequence[Answer], n: int, *, reported: bool) -> dict[str, Any]:
    """The token counts of the answers to one request, and their highest risk if it may be ``reported``.

    Each prompt has ``n`` answers, and counts once.
    """
    of_prompts = [answer.usage for answer in answers[::n]]
    prompt = sum(usage.prompt_tokens for usage in of_prompts)
    completion = sum(answer.usage.completion_tokens for answer in answers)
    details: dict[str, Any] = {"reasoning_tokens": sum(answer.reasoning_tokens or 0 for answer in answers)}
    if reported:
        details |= max_risk_of([answer.answered for answer in answers if answer.answered is not None])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in of_prompts)},
        "completion_tokens_details": details,
    }


def max_risk_of(answers: Sequence[Generation]) -> dict[str, float]:
    """The highest risk of all answers, for the details of their usage; empty if one is not a finite number."""
    risks = [risk for answer in answers if (risk := finite(answer.max_risk)) is not None]
    return {"cocoa_max_risk": max(risks)} if risks and len(risks) == len(answers) else {}
