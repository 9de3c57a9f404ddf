"""An output parser that returns text and risk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseTransformOutputParser
from langchain_core.outputs import Generation
from langchain_core.runnables.utils import AddableDict

from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.detail import Stored, expanded_report
from cocoa_integrations._shared.metadata import RISK_KEY
from cocoa_integrations.langchain.detail import stored_in
from cocoa_integrations.langchain.runnables import find_risk, get_risk


class RiskOutputParser(BaseTransformOutputParser[dict[str, Any]]):
    """Parses an answer of ``ChatCocoa`` into ``{"text": ..., "risk": ...}`` with its ``cocoa_risk`` report.

    In a stream, each chunk is passed on immediately as ``{"text": ...}``; the last one also has ``"risk"``. The sum of
    the chunks is the parsed answer. ``CocoaLLM`` returns only text: use ``CocoaLLM.with_risk()``.

    Example:
        >>> chain = prompt | ChatCocoa() | RiskOutputParser()
        >>> chain.invoke({"question": "Who wrote Dune?"})["risk"]["max_risk"]

    Raises:
        ConfigError: the answer has no report, or was interrupted.
    """

    def parse(self, text: str) -> NoReturn:
        """Refuse plain text, which has no risk report.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("plain text has no risk report; parse a message of ChatCocoa, or use CocoaLLM.with_risk()")

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> dict[str, Any]:
        """Text and report of an answer. A partial answer may have no report yet."""
        [answer] = result
        report = find_risk(answer) if partial else get_risk(answer)
        return dict(text_and_risk(answer.text, report))

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[dict[str, Any]]:
        chunks = _Chunks(self)
        for chunk in input:
            yield chunks.parsed(chunk)
        chunks.end()

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[dict[str, Any]]:
        chunks = _Chunks(self)
        async for chunk in input:
            yield chunks.parsed(chunk)
        chunks.end()

    @property
    def _type(self) -> str:
        return "cocoa_risk"


def text_and_risk(text: str, report: dict[str, Any] | None = None) -> AddableDict:
    """Text and report as a dict whose chunks can be added. Without a report, only the text."""
    return AddableDict(text=text) if report is None else AddableDict(text=text, risk=report)


class _Chunks:
    """Parses the chunks of one stream."""

    def __init__(self, parser: RiskOutputParser) -> None:
        self._parser = parser
        self._last: BaseMessage | None = None
        self._reported = False
        self._stored = Stored("")

    def parsed(self, chunk: str | BaseMessage) -> AddableDict:
        if isinstance(chunk, str):
            self._parser.parse(chunk)
        self._last = chunk
        self._stored += stored_in(chunk)  # a compact report leaves out the texts of the whole answer
        report = expanded_report(chunk.response_metadata.get(RISK_KEY), self._stored)
        self._reported |= report is not None
        return text_and_risk(chunk.text, report)

    def end(self) -> None:
        if not self._reported and self._last is not None:
            get_risk(self._last)  # raises an error that explains what is missing
