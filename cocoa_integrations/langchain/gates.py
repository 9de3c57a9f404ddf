"""Risk gates: runnables that act on answers whose risk reaches a threshold."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal, TypeVar

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration
from langchain_core.runnables import RunnableConfig, RunnableGenerator

from cocoa_engine import Generation as EngineGeneration
from cocoa_engine import UnitLevel
from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import is_unspaced, open_block, open_inline
from cocoa_engine.report import SPANS_KEY, RiskReport, SpanReport
from cocoa_integrations._shared.edits import Change, Edit, EditedText, is_machine_read, is_replaced, may_become_json
from cocoa_integrations._shared.limits import ABSTENTION, MARK, GateMetric, Limit, Mark, require_reaction
from cocoa_integrations.langchain import answers
from cocoa_integrations.reports import find_risk, get_risk, get_spans

OnRisk = Literal["raise", "mark", "abstain"]
A = TypeVar("A")


def risk_gate(
    threshold: float | None = None,
    *,
    metric: GateMetric | None = None,
    unit: UnitLevel = "span",
    on_risk: OnRisk = "raise",
    mark: Mark = MARK,
    answer: str = ABSTENTION,
) -> "RiskGate":
    """A runnable that passes an answer on unless its risk, or that of one of its spans, reaches the threshold.

    Input and output are a message of ``ChatCocoa``, a generation, or the ``{"text", "risk"}`` of
    ``CocoaLLM.with_risk()`` and :class:`RiskOutputParser`. Put parsers that drop the risk after the gate. If the gate
    acted on an answer, the report has an entry ``"gate"`` with the action, the metric, the threshold, and the value
    that reached it.

    **Streams.** With ``raise`` and ``abstain`` the answer is passed on as one chunk at the end, and a fallback can
    still start from the beginning. With ``mark``, messages are streamed, and each risky span is marked as it arrives;
    the text from a possible tool call onwards, and dicts of text and risk, are passed on at the end.

    Args:
        threshold: the value from which an answer is too risky. Default: ``answer_threshold`` or ``threshold`` of the
            report, which is the calibrator's, or a measured default of its ``risk_source``. `cocoa threshold` shows
            what other values would stop on your own prompts.
        metric: the value to compare: ``risk`` of a span or ``answer_risk`` of the answer as a whole, in [0, 1];
            ``con_mlds`` or ``f_mlds``, the raw MLDS, which have no default threshold; or ``self_information`` (-log p
            of the span, in nats). Spans that contain only whitespace, and end-of-sequence tokens, do not count.
            Default: ``answer_risk``; ``risk`` with a threshold, with another ``unit`` or with ``on_risk="mark"``.
        unit: what is compared, and marked: each ``span``; each ``claim``, a name, number, date, short quotation or
            content word, with the highest value of its spans; or each ``sentence``, with the mean of its three riskiest
            claims. With ``claim`` and ``sentence``, streams are passed on at the end.
        on_risk: ``raise`` a ``HallucinationRiskError``, for ``with_fallbacks``; ``mark`` the risky spans in the text;
            or ``abstain``: replace the text by ``answer`` and drop tool calls. The spans of the report keep the
            original text.
        mark: how to mark a span: a template of ``{text}`` and ``{value}``, such as
            ``"<mark title='{value:.2f}'>{text}</mark>"``, or a function of the text and the :class:`.SpanReport`;
            one whose result does not have the text redacts it. Whitespace at the ends of a span stays outside the mark.
            The offsets in the report refer to the shown text, those of a marked span to the text inside the mark. A
            message with tool calls is not marked. The text is not escaped: do not insert it into HTML as it is.
        answer: the text that replaces an answer with ``abstain``.

    Example:
        >>> strict = prompt | ChatCocoa() | risk_gate()
        >>> careful = prompt | ChatCocoa(alpha=6.0, max_candidates=16) | risk_gate(on_risk="abstain")
        >>> chain = strict.with_fallbacks([careful], exceptions_to_handle=(HallucinationRiskError,)) | StrOutputParser()

    Raises:
        ConfigError: an option is invalid. A call raises it if the answer has no report, or was interrupted.
    """
    require_reaction(on_risk, OnRisk, mark, answer)
    if on_risk == "mark" and metric == "answer_risk":
        raise ConfigError("on_risk='mark' marks spans, and answer_risk is that of the answer as a whole")
    # an answer as a whole cannot be marked
    limit = Limit(threshold, "risk" if metric is None and on_risk == "mark" else metric, unit)
    return RiskGate(limit, on_risk, mark, answer)


class RiskGate(RunnableGenerator[Any, Any]):
    """The runnable that :func:`risk_gate` returns."""

    def __init__(self, limit: Limit, on_risk: OnRisk, mark: Mark, answer: str) -> None:
        super().__init__(self._chunks, self._achunks, name="RiskGate")
        self.limit, self.on_risk, self.mark, self.answer = limit, on_risk, mark, answer

    def passed(self, answer: A) -> A:
        if isinstance(answer, EngineGeneration):
            raise ConfigError("a gate takes LangChain answers; for a Generation of the engine use max_risk()")
        if isinstance(answer, ChatGeneration):
            passed: Any = self.passed(answer.message)
            same = passed is answer.message
            return answer if same else type(answer)(message=passed, generation_info=answer.generation_info)
        report = get_risk(answer)
        if not self.limit.reached(report):
            return answer
        if self.on_risk == "raise":
            error = self.limit.error(report)
            error.answer = self.with_gate_entry(answer)
            raise error
        if self.on_risk == "abstain":
            return self.with_gate_entry(answers.replaced(answers.without_tool_calls(answer), self.answer))
        if not answers.calls_tools(answer):
            if is_replaced(report):  # by a gate before
                return answer
            message: Any = answer
            text = message["text"] if isinstance(answer, Mapping) else message.text
            answer = answers.with_change(answer, self.limit.with_marks(text, report, self.mark))
        return self.with_gate_entry(answer)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self._call_with_config(self.passed, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        async def apassed(answer: Any) -> Any:
            return self.passed(answer)

        return await self._acall_with_config(apassed, input, config)

    def _chunks(self, input: Iterator[Any]) -> Iterator[Any]:
        stream = _Stream(self)
        for chunk in input:
            yield from stream.add(chunk)
        yield from stream.end()

    async def _achunks(self, input: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stream = _Stream(self)
        async for chunk in input:
            for passed in stream.add(chunk):
                yield passed
        for passed in stream.end():
            yield passed

    def with_gate_entry(self, answer: A, action: str | None = None) -> A:
        """The answer with an entry in its report about the action; by default that of the gate."""
        report = get_risk(answer)
        gate = self.limit.gate(report, action or self.on_risk)
        return answers.with_report(answer, report.with_values(gate=gate))


class _Stream:
    def __init__(self, gate: RiskGate) -> None:
        self._gate = gate
        self._streams = gate.on_risk == "mark" and gate.limit.unit == "span"
        self._buffered: Any = None
        self._last: BaseMessage | None = None
        self._reported = False
        self._begin = 0  # the offset of the first character, after any reasoning
        self._text = ""  # of the chunks so far, without marks
        self._passed = 0  # characters of it that were passed on; the others may still get a mark, or be part of a word
        self._pending: list[SpanReport] = []  # spans that were not passed on
        self._line: list[SpanReport] = []  # spans of the line that is not complete
        self._before = ""  # what stands before them in that line, after the line that opens a block of code
        self._grown = 0  # characters of the marks before it
        self._edits: list[Edit] = []  # of what was passed on

    def add(self, chunk: Any) -> Iterator[Any]:
        if self._buffered is None and self._streams and self._continues(chunk):
            yield self._marked(chunk)
        else:
            self._buffered = chunk if self._buffered is None else self._buffered + chunk

    def end(self) -> Iterator[Any]:
        if self._buffered is not None:
            yield self._rest(self._buffered) if self._text else self._gate.passed(self._buffered)
        elif self._last is not None and not self._reported:
            text, spans = self._taken(is_last=True)
            if text:
                yield _with_chunk_spans(AIMessageChunk(content=text, id=self._last.id), spans)
            get_risk(self._last)  # raises an error that explains what is missing

    def _continues(self, chunk: Any) -> bool:
        """Whether the text of a chunk is that of its spans. Where a tool call may begin it is not: it is delayed."""
        if not isinstance(chunk, BaseMessage):
            return False
        spans, text = get_spans(chunk), chunk.text
        written = "".join(span.text or "" for span in spans if not span.is_reasoning)
        if self._text or not any(span.part for span in spans):
            return written == text
        return written.endswith(text) and written.removesuffix(text).rstrip()[-1:] in ("", ">")  # after a closing tag

    def _marked(self, chunk: BaseMessage) -> BaseMessage:
        self._last, spans, text, report = chunk, get_spans(chunk), chunk.text, find_risk(chunk)
        if text and not self._text:
            self._begin = spans[-1].end - len(text)
        self._text += text
        if self._text:
            self._pending += spans
            self._line += [span for span in spans if not span.is_reasoning]
            is_json = report is not None and not self._passed and is_machine_read(self._text, report)
            shown, moved = self._taken(is_last=report is not None, is_json=is_json)
            if shown != text:
                chunk = answers.with_text(chunk, shown)
            if moved != spans:
                chunk = _with_chunk_spans(chunk, moved)
        if report is None:
            return chunk
        self._reported = True
        return self._with_gate_entry(answers.with_report(chunk, self._marks(report).of_report(report)))

    def _taken(self, *, is_last: bool, is_json: bool = False) -> tuple[str, list[SpanReport]]:
        """The text and the spans that can be passed on. A word, a mark or JSON that may go on is kept back."""
        if not self._line or not (is_last or self._passed or not may_become_json(self._text)):
            return "", []
        begin, text = self._begin, self._text
        first = max(self._line[0].start - begin, 0)
        line = EditedText(text[first:], (), begin + first)
        edits = self._gate.limit.mark_edits(line.spans(self._line), self._gate.mark, before=self._before)
        edits = [edit for edit in edits if edit.text is not None or not is_json]
        end = len(text)
        while not is_last and end > self._passed and not (text[end - 1].isspace() or is_unspaced(text[end - 1])):
            end -= 1
        if callable(self._gate.mark) and not is_last:  # signs may be redacted with the word that follows them
            parts = self._gate.limit.risky(line.spans(self._line))
            risky = [(part.start - begin, part.end - begin) for part, _ in parts]
            while end > self._passed and not text[end - 1].isalnum() and any(a < end <= b for a, b in risky):
                end -= 1
        last_line = text.rfind("\n") + 1
        opened = last_line + open_inline(text[last_line:])
        held = max(self._passed, opened - len(text[:opened].rpartition(" ")[2]))  # what touches it may be redacted, too
        for edit in reversed(edits):
            following = text[edit.end - begin : end].strip()  # a word after punctuation may continue the sentence
            goes_on = edit.end - begin >= min(end, opened + 1) or (following and not any(map(str.isalnum, following)))
            if not is_last and goes_on and edit.start - begin >= self._passed:
                end = min(end, edit.start - begin, held)
        new = [edit for edit in edits if self._passed <= edit.start - begin and edit.end - begin <= end]
        edits = [*(edit for edit in self._edits if edit.start - begin >= first), *new]
        change = EditedText(text[first:end], (), begin + first).changed(edits)
        ready = [span for span in self._pending if span.end - begin <= end]
        self._pending = self._pending[len(ready) :]
        moved = [
            span.with_values(start=span.start + self._grown, end=span.end + self._grown) for span in change.moved(ready)
        ]
        self._edits += new
        shown = EditedText(text[self._passed : end], (), begin + self._passed).changed(new).text
        self._passed = end
        spans, before = self._line, first
        first, begins = end + 1, text.rfind("\n", 0, end) + 1
        while begins < first:  # also where a span or a mark that goes on began
            self._line = [span for span in spans if span.end - begin > begins]
            first = max(self._line[0].start - begin, 0) if self._line else end
            begins = min([first, *(edit.start - begin for edit in edits if edit.start < begin + first < edit.end)])
        seen = self._before + text[before:first]
        begins = seen.rfind("\n") + 1
        self._before = open_block(seen[:begins]) + seen[begins:]
        self._grown += sum(map(_growth, (edit for edit in edits if edit.end - begin <= first)))
        return shown, moved

    def _rest(self, chunk: BaseMessage) -> BaseMessage:
        report = get_risk(chunk)
        if answers.calls_tools(chunk):
            rest, spans = self._taken(is_last=True)
            change = self._marks(report)
            chunk = self._with_gate_entry(answers.with_report(chunk, change.of_report(report), change))
            chunk = _with_chunk_spans(chunk, [*spans, *get_spans(chunk)]) if spans else chunk
            return answers.with_text(chunk, rest + chunk.text) if rest else chunk
        if self._pending:
            chunk = _with_chunk_spans(chunk, [*self._pending, *get_spans(chunk)])
        change = self._gate.limit.with_marks(self._text + chunk.text, report, self._gate.mark)
        shown = self._passed + sum(map(_growth, self._edits))
        return self._with_gate_entry(answers.with_text(answers.with_change(chunk, change), change.text[shown:]))

    def _marks(self, report: RiskReport) -> Change:
        generated = "".join(span.text or "" for span in report.spans)
        return EditedText(generated[self._begin :], (), self._begin).changed(self._edits)

    def _with_gate_entry(self, chunk: BaseMessage) -> BaseMessage:
        return self._gate.with_gate_entry(chunk) if self._gate.limit.reached(get_risk(chunk)) else chunk


def _with_chunk_spans(chunk: BaseMessage, spans: list[SpanReport]) -> BaseMessage:
    kwargs = {**chunk.additional_kwargs, SPANS_KEY: [span.to_dict() for span in spans]}
    return chunk.model_copy(update={"additional_kwargs": kwargs})


def _growth(edit: Edit) -> int:
    replaced = 0 if edit.text is None else len(edit.text) - (edit.end - edit.start)
    return len(edit.before or "") + len(edit.after or "") + replaced
