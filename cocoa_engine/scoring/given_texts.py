"""Scores of given texts, as generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from cocoa_engine.arguments import given_or_new
from cocoa_engine.cancellation import Cancellation
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import DecidedSpan, log_prob_and_score
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.decoding.result_builder import make_span, source_heads_of, with_answer_risk
from cocoa_engine.decoding.speculation import AnswerHistory
from cocoa_engine.decoding.task import require_ability
from cocoa_engine.equations import span_log_prob
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.execution.backends import Backend
from cocoa_engine.execution.session import Session
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.prompts import (
    ChatTokens,
    Prompt,
    Source,
    Texts,
    is_many,
    passage_positions,
    prompt_ids,
    text_ids,
)
from cocoa_engine.process_exit import at_work
from cocoa_engine.results import Generation
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.risk.policy import RiskMeasure, reaches
from cocoa_engine.scoring.candidates import CandidateGrower
from cocoa_engine.scoring.teacher_forcing import GivenText, ScoredText, score_divided, score_text, score_texts
from cocoa_engine.scoring.text_tree import TextTree
from cocoa_engine.spans import Candidate, Span, Usage


@at_work
def score(
    session: Session,
    prompt: Prompt,
    text: str | Sequence[int] | Texts,
    config: CocoaConfig,
    measure: Callable[[], RiskMeasure],
    source: Source | None = None,
    *,
    divide: bool = False,
    cancellation: Cancellation | None = None,
) -> Generation | list[Generation]:
    """Score a text, or each of several texts; see :meth:`CocoaEngine.score`.

    Args:
        measure: says how risks are computed. It may run the model, and is called after everything was checked.
    """
    cancellation = given_or_new(cancellation, Cancellation, "cancellation")

    def scored() -> Generation | list[Generation]:
        scorer = _Scorer(session, prompt, config, measure, source, cancellation)
        if not divide:
            return scorer.many(text) if is_many(text) else scorer.one(text)
        if is_many(text):
            return [scorer.divided(cast("str | Sequence[int]", one)) for one in text]
        return scorer.divided(cast("str | Sequence[int]", text))

    return cancellation.run(scored)


class _Scorer:
    """Scores texts after one prompt."""

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        config: CocoaConfig,
        measure: Callable[[], RiskMeasure],
        source: Source | None,
        cancellation: Cancellation,
    ) -> None:
        self._session, self._config, self._how = session, config, measure
        self._cancellation = cancellation
        capture_spec(session.model, config)  # checks that the settings fit the model
        self._prompt = prompt
        self._before = prompt_ids(session.model, session.tokens, prompt)
        self._passages = passage_positions(session.tokens, prompt, self._before, source)

    def one(self, text: str | Sequence[int] | Texts) -> Generation:
        """A single text, in one forward pass."""
        ids, shown = self._ids(text, "text to score")
        self._choose_measure()
        decided = score_text(
            self._session.model, self._before, ids, self._config, self._plain, len(shown), *self._measured
        )
        (scored,) = self._by_method([ScoredText(decided, 1)])
        return self._generation(shown, [scored.decided], scored.forward_passes)

    def divided(self, text: str | Sequence[int]) -> Generation:
        """A single text, divided at its risk points, in one forward pass.

        Raises:
            ConfigError: the method's score needs passes of its own.
        """
        method = self._config.method
        if METHODS[method].needs_own_passes:
            raise ConfigError(
                f"method={method!r} scores a text as one span; leave divide=True out, or use 'cocoa-sig'."
            )
        ids, shown = self._ids(text, "text to score")
        self._choose_measure()
        spans = score_divided(self._session.model, self._before, ids, self._config, self._plain, *self._measured)
        grown: Sequence[list[Candidate]] = [[] for _ in ids]
        if self._calibrator is not None and self._calibrator.span is not None and METHODS[method].branches:
            (grown,) = CandidateGrower(self._session, self._config, self._cancellation)(self._before, [ids])
        candidates, start = [], 0
        for span in spans:
            candidates.append(grown[start])
            start += len(span.token_ids)
        return self._generation(shown, spans, 1, candidates)

    def many(self, texts: str | Sequence[int] | Texts) -> list[Generation]:
        """Several texts; the prompt is encoded once."""
        given = [self._ids(text, f"text to score at index {number}") for number, text in enumerate(texts)]
        self._choose_measure()
        lengths = [GivenText(ids, len(shown)) for ids, shown in given]
        backend, config = self._session.backend, self._config
        scored = self._by_method(
            score_texts(
                backend,
                self._before,
                lengths,
                config,
                self._plain,
                *self._measured,
                cancellation=self._cancellation,
            )
        )
        return [
            self._generation(shown, [one.decided], one.forward_passes)
            for (_, shown), one in zip(given, scored, strict=True)
        ]

    def _choose_measure(self) -> None:
        """Choose how risks are computed, and what is captured for it.

        Raises:
            ConfigError: the model as it runs cannot give what the method needs.
            CalibrationError: it cannot give what the calibrator needs.
        """
        session, config = self._session, self._config
        self._cancellation.check()  # what follows runs the model
        self._measure = self._how()
        self._calibrator = calibrator = self._measure.calibrator
        self._capture = capture_spec(session.model, config, calibrator)
        if METHODS[config.method].needs_own_passes or (calibrator is not None and calibrator.heads):
            require_ability(config.method, session.backend, self._capture, calibrator)

    @property
    def _measured(self) -> tuple[tuple[range, ...], RiskCalibrator | None]:
        """What is measured in addition: the attention on the passages, and the calibrator's probe."""
        return self._passages, self._calibrator

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
        backend, config = self._session.backend, self._config
        return rescored(backend, self._before, scored, config, self._capture, self._cancellation)

    def _generation(
        self,
        shown: str,
        decided: Sequence[DecidedSpan],
        forward_passes: int,
        candidates: Sequence[list[Candidate]] = (),
    ) -> Generation:
        """The result of a text.

        Args:
            shown: the text.
            decided: its spans.
            forward_passes: the number of passes it took.
            candidates: for each span, the candidates where it begins, if they were grown.
        """
        history = AnswerHistory(self._before)
        token_ids = [token_id for span in decided for token_id in span.token_ids]
        ends = self._ends(token_ids, shown)
        spans: list[Span] = []
        start = at = 0
        for number, one in enumerate(decided):
            copied, before = history.extend(one.token_ids, one.token_log_probs, one.token_entropies)
            competing = candidates[number] if candidates else []
            chosen = (index for index, other in enumerate(competing) if other.token_ids[:1] == one.token_ids[:1])
            at += len(one.token_ids)
            end = len(shown) if at == len(token_ids) else ends[at - 1]
            measured = replace(
                one,
                token_copied=copied,
                preceding=before,
                token_ends=ends[at - len(one.token_ids) : at],
                candidates=competing,
                chosen=next(chosen, None),
            ).for_calibrator(self._calibrator)
            position = (start, end, shown[start:end])
            spans.append(make_span(measured, position, self._config, self._measure, given=True))
            start = end
        generation = Generation(
            text=shown,
            token_ids=token_ids,
            spans=spans,
            finish_reason=None,
            usage=Usage(
                prompt_tokens=len(self._before),
                completion_tokens=len(token_ids),
                forward_passes=forward_passes,
                fed_tokens=len(token_ids),
            ),
            config=self._config,
            model_name=self._session.model_name,
            threshold=self._measure.threshold_of(spans[0].risk_source),
            source_heads=source_heads_of(spans, self._measure),
            question_tokens=self._prompt.question_tokens if isinstance(self._prompt, ChatTokens) else None,
        )
        return with_answer_risk(generation, self._calibrator)

    def _ends(self, token_ids: Sequence[int], shown: str) -> list[int]:
        """Where each token ends in the text. Some tokenizers drop the space that the text begins with."""
        track = Detokenizer(self._session.tokens)
        ends = []
        for token_id in token_ids:
            track.push(token_id)
            ends.append(len(track.text))
        dropped = shown[:1].isspace() and not track.text[:1].isspace()
        return [min(end + dropped, len(shown)) for end in ends]


def rescore(span: Span, config: CocoaConfig) -> Span:
    """A scored text under another method, metric, alpha or ``span_log_prob``, without a forward pass.

    Args:
        span: the span of :meth:`CocoaEngine.score`. Its log-probabilities, MLDS and risk stay as they are.
        config: the settings that give the new score. The layers must be those of ``span``.

    Returns:
        A copy with the new ``log_prob`` and ``score``.

    Raises:
        ConfigError: the method's score takes forward passes of its own (``dola``, ``decore``, ``diver``).
    """
    if METHODS[config.method].needs_own_passes:
        raise ConfigError(f"method={config.method!r} takes forward passes of its own; use CocoaEngine.score.")
    log_prob, score = log_prob_and_score(config, span.token_log_probs, span.con_mlds, span.f_mlds)
    limited = reaches(span.risk, config.max_risk)
    return span.model_copy(update={"log_prob": log_prob, "score": score, "reaches_max_risk": limited})


def rescored(
    backend: Backend,
    prompt: list[int],
    scored: Sequence[ScoredText],
    config: CocoaConfig,
    capture: CaptureSpec,
    cancellation: Cancellation | None = None,
) -> list[ScoredText]:
    """Replace the scores of texts by the configured method's, and add its forward passes to theirs.

    A contrasting method scores the contrasts of the tokens. A method that reads back (Diver) scores the prompt again
    after the text, for the mutual information log p(prompt | prompt, text) - log p(prompt | prompt).
    """
    method = METHODS[config.method]
    texts = [decided.token_ids for decided, _ in scored]
    result = []
    if isinstance(method, ContrastingMethod):
        found = _contrasts(backend, method, prompt, texts, config, capture, cancellation)
        for (decided, passes), (contrasts, more) in zip(scored, found, strict=True):
            score = span_log_prob(contrasts, config.span_log_prob)
            result.append(ScoredText(replace(decided, score=score), passes + more))
        return result
    read_back = [GivenText([*text, *prompt], 0) for text in ([], *texts)]
    without, *after = score_texts(backend, prompt, read_back, config, capture, cancellation=cancellation)
    log_prob_without = sum(without.decided.token_log_probs)
    for (decided, passes), read in zip(scored, after, strict=True):
        pmi = sum(read.decided.token_log_probs[len(decided.token_ids) :]) - log_prob_without
        _, score = log_prob_and_score(config, decided.token_log_probs, decided.con_mlds, decided.f_mlds, pmi=pmi)
        more = max(read.forward_passes, without.forward_passes)  # usually the two are fed together
        result.append(ScoredText(replace(decided, score=score), passes + more))
    return result


def _contrasts(
    backend: Backend,
    method: ContrastingMethod,
    prompt: list[int],
    texts: Sequence[list[int]],
    config: CocoaConfig,
    capture: CaptureSpec,
    cancellation: Cancellation | None,
) -> list[tuple[list[float], int]]:
    """The contrasts of each text's tokens, with no token excluded as implausible, and the forward passes they took.

    The prompt is prefilled once without its last token. That token is fed with every text, because its output is
    contrasted too.
    """
    fed = [[prompt[-1], *text[:-1]] for text in texts]
    width = max(1, backend.paths_per_step // (1 + len(capture.early)))  # rows of logits for every layer
    contrasts: list[list[float]] = [[] for _ in texts]
    passes = [0] * len(texts)
    with TextTree(backend, prompt[:-1], fed, capture, rows_per_step=width, cancellation=cancellation) as tree:
        for group in tree.groups():
            for step in group.steps():
                assert step.output.others is not None
                of_step = method.contrast(step.output.logits.float(), step.output.others, config)  # [W, V]
                for number in group.numbers:
                    if here := group.within(step, number):
                        done = len(contrasts[number])
                        rows = torch.tensor(here, device=of_step.device)
                        targets = torch.tensor(texts[number][done : done + len(here)], device=of_step.device)
                        contrasts[number] += of_step[rows, targets].tolist()
                        passes[number] += group.passes(step, number)
        return [(found, tree.prompt_passes + more) for found, more in zip(contrasts, passes, strict=True)]
