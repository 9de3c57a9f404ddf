"""The state of a chat: its turns, its passages, and the last answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cocoa_engine.cli.live_answer import decode_live
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import Terminated
from cocoa_engine.config import CocoaConfig
from cocoa_engine.rendering.highlights import MOST_SHADED
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.terminal import answer_text, spans_text
from cocoa_engine.rendering.verdict import verdict
from cocoa_engine.rendering.wording import NOT_CALIBRATED, count
from cocoa_engine.risk import Check, MeasuredText
from cocoa_engine.spans import Span

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


class Conversation:
    """Several questions to one engine. Each prompt holds the turns before it.

    Args:
        engine: the engine, whose model has a chat template.
        config: the settings of the next answer; may be replaced between questions.
        system: a system message before the first question.
        console: where answers are shown.
        draws: whether an answer is shown while it is decoded.
        keeps: whether Ctrl-C ends the answer only. Otherwise it ends the program.
    """

    def __init__(
        self,
        engine: CocoaEngine,
        config: CocoaConfig,
        system: str | None,
        console: Console,
        *,
        draws: bool,
        keeps: bool,
    ) -> None:
        self.config = config
        self._engine, self._system, self._console, self._draws, self._keeps = engine, system, console, draws, keeps
        self._marks = console.color_system is None
        self._warned = False  # that the risk is not calibrated, which is said once
        self.reset()

    def reset(self) -> None:
        """Forget the turns and the passages."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._passages: list[str] = []  # of the turns so far
        self._added: list[str] = []  # for the next question
        self.checks: list[Check] | None = None
        """The claims of the last answer to check, riskiest first; `None` before the first answer."""

    def add_passage(self, passage: str) -> None:
        """Put a passage before the next question, and measure the attention of answers to it."""
        self._added.append(passage)

    def drop_added(self) -> int:
        """Forget the passages that no question holds yet, and return their number."""
        dropped, self._added = len(self._added), []
        return dropped

    def ask(self, question: str) -> None:
        """Answer a question and show the verdict and the answer. A question that fails is not kept.

        That the risk is not calibrated is said with the first answer only.

        Raises:
            CocoaError: as :meth:`CocoaEngine.stream_chat`.
            KeyboardInterrupt: on Ctrl-C, unless the conversation ``keeps``.
        """
        messages = [*self._messages, {"role": "user", "content": "\n\n".join([*self._added, question])}]
        passages = [*self._passages, *self._added]
        spans: list[Span] = []
        try:
            with self._engine.stream_chat(messages, config=self.config, source=passages or None) as stream:
                options: Any = {"draws": self._draws, "progress": Progress("chat")}
                answer = decode_live(stream, self._console, spans, self._live, **options)
        except KeyboardInterrupt as error:
            if not self._keeps or isinstance(error, Terminated):
                raise
            if not spans:
                self._show("Stopped before the first span. The question is not kept.")
                return
            text = "".join(span.text for span in spans)
            self._show(f"Stopped after {count(len(spans), 'span')}.", lambda: self._live(spans))
            self.checks = MeasuredText(text, spans, has_source=bool(passages)).check_these(MOST_SHADED)
        else:
            text = answer.text
            said = verdict(answer)
            if self._warned:
                said = said.removesuffix(NOT_CALIBRATED).rstrip()
            self._warned = self._warned or NOT_CALIBRATED in said
            self._show(said, lambda: answer_text(answer, marks=self._marks))
            self.checks = answer.check_these(MOST_SHADED)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._passages, self._added = passages, []

    def _live(self, spans: Sequence[Span]) -> Text:
        return spans_text(spans, scale=RiskScale.of(spans), marks=self._marks)

    def _show(self, verdict: str, answer: Callable[[], Text] | None = None) -> None:
        lines: list[Text] = [] if answer is None else [Text(), answer()]
        parts = [Text(verdict, style="bold"), *lines, Text()]
        self._console.print(*parts, sep="\n", soft_wrap=not self._console.is_terminal)
