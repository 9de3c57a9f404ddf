"""Scoring given texts after a prompt by the configured method; the implementation of :meth:`CocoaEngine.score`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.answer_history import AnswerHistory
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.decoding.result_builder import make_span, with_answer_risk
from cocoa_engine.decoding.task import require_ability
from cocoa_engine.errors import PromptError
from cocoa_engine.execution.session import Session
from cocoa_engine.methods import METHODS
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.prompts import Prompt, Texts, is_many, prompt_ids, text_ids
from cocoa_engine.results import Generation
from cocoa_engine.scoring.rescoring import rescored
from cocoa_engine.scoring.shared_prompt import GivenText, ScoredText, score_texts
from cocoa_engine.scoring.teacher_forcing import score_text
from cocoa_engine.spans import Usage


def score(
    session: Session,
    prompt: Prompt,
    text: str | Sequence[int] | Texts,
    config: CocoaConfig,
    calibrator: RiskCalibrator | None = None,
) -> Generation | list[Generation]:
    """Score a text, or each of several texts; see :meth:`CocoaEngine.score`."""
    scorer = _Scorer(session, prompt, config, calibrator)
    return scorer.many(text) if is_many(text) else scorer.one(text)


class _Scorer:
    """Scores texts after one prompt."""

    def __init__(
        self, session: Session, prompt: Prompt, config: CocoaConfig, calibrator: RiskCalibrator | None
    ) -> None:
        self._session, self._config, self._calibrator = session, config, calibrator
        self._capture = capture_spec(session.model, config, calibrator)
        if METHODS[config.method].needs_own_passes or (calibrator is not None and calibrator.heads):
            require_ability(config.method, session.backend, self._capture, calibrator)
        self._prompt = prompt
        self._before = prompt_ids(session.model, session.tokens, prompt)

    def one(self, text: str | Sequence[int] | Texts) -> Generation:
        """A single text, in one forward pass."""
        ids, shown = self._ids(text, "text to score")
        decided = score_text(
            self._session.model, self._before, ids, self._config, self._plain, len(shown), self._calibrator
        )
        (scored,) = self._by_method([ScoredText(decided, 1)])
        return self._generation(shown, scored)

    def many(self, texts: str | Sequence[int] | Texts) -> list[Generation]:
        """Several texts; the prompt is encoded once."""
        given = [self._ids(text, f"text to score at index {number}") for number, text in enumerate(texts)]
        lengths = [GivenText(ids, len(shown)) for ids, shown in given]
        scored = self._by_method(
            score_texts(self._session.backend, self._before, lengths, self._config, self._plain, self._calibrator)
        )
        return [self._generation(shown, one) for (_, shown), one in zip(given, scored, strict=True)]

    @property
    def _plain(self) -> CaptureSpec:
        """The capture spec for the model's own distribution, without what a contrasting method needs."""
        return self._capture._replace(early=(), masked=())

    def _ids(self, text: object, what: str) -> tuple[list[int], str]:
        """Token ids of a text, and the text that the result reports.

        Raises:
            PromptError: the text is empty, or does not fit the context window.
        """
        model = self._session.model
        ids, shown = text_ids(model, self._session.tokens, self._prompt, self._before, text, what)
        method, window, count = self._config.method, model.context_window, len(self._before)
        if METHODS[method].reads_back and window is not None and 2 * count + len(ids) > window:
            raise PromptError(
                f"the prompt ({count} tokens), which method={method!r} reads twice, and the text to score "
                f"({len(ids)}) exceed the model's context window of {window}."
            )
        return ids, shown

    def _by_method(self, scored: list[ScoredText]) -> list[ScoredText]:
        """The texts with the configured method's score. Some methods need more forward passes for it."""
        if not METHODS[self._config.method].needs_own_passes:
            return scored
        return rescored(self._session.backend, self._before, scored, self._config, self._capture)

    def _generation(self, shown: str, scored: ScoredText) -> Generation:
        decided, forward_passes = scored
        history = AnswerHistory(self._before)
        copied, _ = history.extend(decided.token_ids, decided.token_log_probs, decided.token_entropies)
        decided = replace(decided, token_copied=copied).for_calibrator(self._calibrator)
        count = len(decided.token_ids)
        generation = Generation(
            text=shown,
            token_ids=decided.token_ids,
            spans=[make_span(decided, (0, len(shown), shown), self._config, self._calibrator, given=True)],
            finish_reason=None,
            usage=Usage(
                prompt_tokens=len(self._before),
                completion_tokens=count,
                forward_passes=forward_passes,
                fed_tokens=count,
            ),
            config=self._config,
            model_name=self._session.model_name,
        )
        return with_answer_risk(generation, self._calibrator)
