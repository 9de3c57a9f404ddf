"""What is asked of a chat service, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cocoa_engine import Cancellation, CocoaConfig, Generation, Span, Timeline, Usage
from cocoa_engine.integration import Criterion, Processor
from cocoa_engine.report import RiskReport, SpanReport
from cocoa_integrations._shared.options import ChatTemplateOptions
from cocoa_integrations.tool_calling import Call, CallDelta, ToolRequest

Source = Sequence[str] | Sequence[tuple[int, int]]
Token = dict[str, Any]
"""A token with its log-probability, as OpenAI's ``logprobs`` have it."""

PassageFinder = Callable[..., list[str] | None]
"""Finds passages in the prompt of a call, once the prompt is known: at most ``most``, or ``None`` if it has none.

The arguments are a function that returns the prompt, the engine if the model is in this process, and ``most``.
"""


@dataclass(frozen=True)
class ChatCall:
    """One call of a chat service: a conversation, or a prompt that is continued as it is.

    Attributes:
        messages: the conversation; see :meth:`~cocoa_integrations.tool_calling.Plan.prompt`.
        prompt: the text or the token ids of a prompt without a chat template.
        config: the settings. A server applies those that were set, and its own instead of the others.
        tools: the tools and the response format.
        template: the options of the chat template.
        source: passages of the prompt, as texts or ranges of its characters, or what finds them.
        logprobs: whether the answer lists the log-probabilities of its tokens.
        lists_special: whether special tokens are among them.
        candidates: whether the entries of spans list the candidates that competed, as ``rivals``.
        splits_reasoning: whether a prompt is one of a chat, whose answer may begin with reasoning.
        calls_must_fit: raise an error for a call that does not fit the schema of its tool.
        context_window: the maximum number of tokens of prompt and answer; by default the model's.
        logits_processor: logits processors, for a model in this process.
        stopping_criteria: stopping criteria, for a model in this process.
        timeout: seconds for the whole answer, for a model in this process.
        cancellation: ends the call, for a model in this process.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | list[int] = ""
    config: CocoaConfig = field(default_factory=CocoaConfig)
    tools: ToolRequest = field(default_factory=ToolRequest)
    template: ChatTemplateOptions = field(default_factory=ChatTemplateOptions)
    source: Source | PassageFinder | None = None
    logprobs: bool = False
    lists_special: bool = False
    candidates: bool = False
    splits_reasoning: bool = False
    calls_must_fit: bool = False
    context_window: int | None = None
    logits_processor: Sequence[Processor] = ()
    stopping_criteria: Sequence[Criterion] = ()
    timeout: float | None = None
    cancellation: Cancellation | None = None


@dataclass(frozen=True)
class Piece:
    """What a span adds to an answer that is streamed.

    Attributes:
        entry: the report of the span; ``None`` for text that no span adds, such as text that was held back.
        content: the new text, outside of reasoning and calls.
        reasoning: the new reasoning.
        calls: the new parts of calls.
        span: the span; ``None`` if a server sent it.
        logprobs: the entries of its tokens, if they were asked for.
    """

    entry: SpanReport | None = None
    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    span: Span | None = None
    logprobs: list[Token] | None = None


@dataclass
class Answer:
    """A complete answer.

    Attributes:
        text: the generated text, with reasoning and calls.
        content: the text outside of reasoning and calls.
        reasoning: the text of the reasoning.
        calls: the tool calls, valid and invalid, each with its id.
        finish_reason: why the answer ended: ``eos``, ``stop``, ``length`` or ``risk``.
        model_name: the name of the model.
        usage: the token counts.
        reasoning_tokens: the number of tokens of the reasoning; ``None`` if the model did not reason.
        logprobs: the entries of its tokens in the format of OpenAI's ``logprobs``, if they were asked for.
        make_report: makes the report.
        rest: what comes after the last streamed piece; empty if the answer was not streamed.
        generation: the answer of the engine; ``None`` if a server sent it.
        answered: the generation without its reasoning.
        timeline: the phases of the call.
    """

    text: str
    content: str
    reasoning: str
    calls: list[Call]
    finish_reason: str | None
    model_name: str | None
    usage: Usage
    reasoning_tokens: int | None
    logprobs: list[Token] | None
    make_report: Callable[[], RiskReport | None]
    rest: Piece = Piece()
    generation: Generation | None = None
    answered: Generation | None = None
    timeline: Timeline | None = None
    _report: RiskReport | None = field(default=None, init=False, repr=False)

    @property
    def report(self) -> RiskReport | None:
        """The risk of the answer, made when it is first read; ``None`` if a server measured none."""
        if self._report is None:
            self._report = self.make_report()
        return self._report

    @property
    def spans(self) -> list[SpanReport]:
        """The reports of its spans."""
        return [] if self.report is None else self.report.spans

    @property
    def valid_calls(self) -> list[Call]:
        """The calls that can be run."""
        return [call for call in self.calls if call.error is None]

    @property
    def invalid_calls(self) -> list[Call]:
        """The calls that were cut off, cannot be parsed, do not fit or are not allowed."""
        return [call for call in self.calls if call.error is not None]
