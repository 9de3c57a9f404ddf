"""Answers to one prompt under many rules of choosing a candidate, sharing what the rules have in common.

Which candidates compete after a prefix depends on the prefix, not on the rule that chooses among them. The candidates
are therefore remembered by prefix. A rule follows its own choices through them, and decodes only from the first prefix
that no other rule has reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.span_scoring import best_candidate, log_probs_and_scores
from cocoa_engine.errors import ConfigError
from cocoa_engine.methods import METHODS
from cocoa_engine.model import detokenizer
from cocoa_engine.model.ends import eos_token_ids
from cocoa_engine.spans import FinishReason, Span

if TYPE_CHECKING:
    from torch import Tensor

    from cocoa_engine.engine import CocoaEngine

MAY_DIFFER = frozenset({"method", "metric", "alpha", "span_log_prob"})
"""The settings in which the rules of one replay may differ: those that only choose among given candidates."""

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class ReplayedAnswer:
    """An answer of :class:`Replay`.

    Attributes:
        token_ids: the tokens of the answer. If it is complete early, only those up to there.
        text: its text, without a stop text.
        finish_reason: why it ended; "complete" if ``is_complete`` was true.
        decoded_tokens: the number of its tokens that were decoded for it; the others were known.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | str
    decoded_tokens: int


class KnownStep(NamedTuple):
    """What follows a prefix of an answer: a greedy run, or the candidates of a risk point. Plain data.

    Attributes:
        prefix: the tokens of the answer before it.
        run: the tokens of the greedy run; empty at a risk point.
        candidates: for each candidate, its token ids, their log-probabilities, ConMLDS, fMLDS and whether it ends the
            answer.
    """

    prefix: list[int]
    run: list[int]
    candidates: list[tuple[list[int], list[float], float, float, bool]]


class Replay:
    """Decodes one prompt under several rules.

    Args:
        engine: the engine with the model.
        prompt: text or token ids.
        config: the settings that all rules share: risk points, branches, layers and limits.
        is_complete: whether a text is an answer to which nothing can be added. Decoding stops there.
        known: the ``steps`` of an earlier replay of the same prompt with the same shared settings.

    Attributes:
        steps: what is known, by prefix.

    Raises:
        ConfigError: the settings sample, or stop at a risk.
        PromptError: as for :meth:`CocoaEngine.generate`.
    """

    def __init__(
        self,
        engine: CocoaEngine,
        prompt: str | Sequence[int],
        config: CocoaConfig,
        is_complete: Callable[[str], bool] = lambda text: False,
        known: Iterable[KnownStep] = (),
    ) -> None:
        if config.temperature > 0 or config.max_risk is not None:
            raise ConfigError("a replay needs temperature=0 and max_risk=None: it has to be told by its rule alone")
        self._engine, self._config, self._is_complete = engine, config, is_complete
        with engine.stream(prompt, config=config) as stream:  # nothing is decoded
            self._prompt, self._processed = stream.prompt, stream.processed
        window = engine.session.model.context_window
        remaining_context = config.max_new_tokens if window is None else window - len(self._prompt)
        self._limit = min(config.max_new_tokens, remaining_context)  # of tokens in an answer
        self._decode = engine.session.tokens.decode
        self._eos = eos_token_ids(engine.session.model.model, engine.session.tokens)
        self.steps: dict[Prefix, KnownStep] = {tuple(step.prefix): step for step in known}

    def answer(self, config: CocoaConfig) -> ReplayedAnswer:
        """The answer under a rule.

        Args:
            config: the shared settings with another rule.

        Raises:
            ConfigError: a setting differs that does not only choose among candidates, or the method contrasts or reads
                the prompt again.
        """
        self._check(config)
        prefix: Prefix = ()
        known_to = 0
        while (ended := self._ended(prefix)) is None:
            step = self.steps.get(prefix)
            if step is None:
                known_to = len(prefix)
                break
            prefix = self._extended(prefix, self._chosen(step, config))
        else:
            return self._answer(prefix, ended, 0)
        # a processor may look at where the answer begins, so the answer cannot be continued as a longer prompt
        start = () if self._processed else prefix
        prefix = start
        for span in self._spans(start, config):
            prefix = self._remember(prefix, span, config)
            if (ended := self._ended(prefix)) is not None:
                break
        assert ended is not None
        return self._answer(prefix, ended, len(prefix) - known_to)

    def _check(self, config: CocoaConfig) -> None:
        shared, given = (one.model_dump(exclude=set(MAY_DIFFER)) for one in (self._config, config))
        if different := sorted(name for name, value in given.items() if value != shared[name]):
            raise ConfigError(f"rules of one replay must have the same {', '.join(different)}")
        method = METHODS[config.method]
        if method.needs_own_passes:
            raise ConfigError(f"method={config.method!r} needs forward passes of its own and cannot be replayed")

    def _spans(self, start: Prefix, config: CocoaConfig) -> Iterator[Span]:
        """Decode after a prefix, span by span. The prefix is part of the prompt; stop texts may begin in it."""
        rest = config.replace(max_new_tokens=self._limit - len(start), stop=())
        with self._engine.stream(
            [*self._prompt, *start], config=rest, stopping_criteria=self._at_stop_text if config.stop else None
        ) as stream:
            yield from stream

    def _at_stop_text(self, ids: Tensor, _scores: object) -> bool:
        return self._stop_at(self._decode(ids[0, len(self._prompt) :].tolist())) is not None

    def _stop_at(self, text: str) -> int | None:
        """The offset of the first stop text."""
        return min((at for stop in self._config.stop if (at := text.find(stop)) >= 0), default=None)

    def _remember(self, prefix: Prefix, span: Span, config: CocoaConfig) -> Prefix:
        """Remember a decoded span, and return the prefix after it."""
        if span.candidates:
            candidates = [
                (one.token_ids, one.token_log_probs, one.con_mlds, one.f_mlds, one.ends_answer)
                for one in span.candidates
            ]
            self.steps[prefix] = KnownStep(list(prefix), [], candidates)
        elif METHODS[config.method].branches:  # other methods pass risk points in greedy runs
            self.steps[prefix] = KnownStep(list(prefix), span.token_ids, [])
        return (*prefix, *span.token_ids)

    def _chosen(self, step: KnownStep, config: CocoaConfig) -> list[int]:
        """The tokens that a rule takes."""
        if not step.candidates:
            return step.run
        if not METHODS[config.method].branches:
            return step.candidates[0][0]  # it continues greedily
        token_ids, log_probs, con, f, ended = zip(*step.candidates, strict=True)
        scores = [score for _, score in log_probs_and_scores(config, log_probs, ended, con, f)]
        return list(token_ids[best_candidate(config, scores, ended)])

    def _extended(self, prefix: Prefix, taken: Iterable[int]) -> Prefix:
        """A prefix with the tokens after it, up to where the answer ends."""
        for token_id in taken:
            prefix = (*prefix, token_id)
            if self._is_end(prefix):
                break
        return prefix

    def _is_end(self, prefix: Prefix) -> FinishReason | None:
        """Whether an answer ends by itself after its last token."""
        if prefix and prefix[-1] in self._eos:
            return "eos"
        if self._config.stop and self._stop_at(self._decode(prefix)) is not None:
            return "stop"
        return "length" if len(prefix) >= self._limit else None

    def _ended(self, prefix: Prefix) -> FinishReason | str | None:
        return self._is_end(prefix) or ("complete" if self._is_complete(self._decode(prefix)) else None)

    def _answer(self, prefix: Prefix, ended: FinishReason | str, decoded: int) -> ReplayedAnswer:
        text = detokenizer.decoded(self._engine.session.tokens, prefix)
        return ReplayedAnswer(list(prefix), text[: self._stop_at(text)], ended, max(0, min(decoded, len(prefix))))
