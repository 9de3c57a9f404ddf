"""The source of an answer: how much context lifts its tokens, and which passage they attend to."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import passage_means
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.execution.session import Session
from cocoa_engine.model.prompts import Prompt, Source, passage_positions, prompt_ids, require_fits, text_ids
from cocoa_engine.model.tokenizer import token_ends
from cocoa_engine.results import Generation
from cocoa_engine.scoring.given_texts import score_spans
from cocoa_engine.scoring.text_tree import fed
from cocoa_engine.spans import Measured, Span


class ContextLift(ResultModel):
    """The effect of the context on one span: each statistic with the context minus the same without it."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    log_prob: float = Field(description="Lift of log p_S (by span_log_prob), in nats. Above 0: supported.")
    con_mlds: float = Field(description="Difference of ConMLDS.")
    f_mlds: float = Field(description="Difference of fMLDS.")
    token_log_probs: list[float] = Field(description="Lift of log p of each token of the span.")

    @classmethod
    def between(cls, with_context: Measured, without: Measured) -> "ContextLift":
        """The difference of one span's statistics. Both spans must have the same number of tokens."""
        tokens = zip(with_context.token_log_probs, without.token_log_probs, strict=True)
        return cls(
            log_prob=with_context.log_prob - without.log_prob,
            con_mlds=with_context.con_mlds - without.con_mlds,
            f_mlds=with_context.f_mlds - without.f_mlds,
            token_log_probs=[a - b for a, b in tokens],
        )


def context_lift(
    engine: CocoaEngine,
    generation: Generation,
    without_context: str | Sequence[int],
    *,
    with_context: str | Sequence[int] | None = None,
) -> list[ContextLift]:
    """The context lift of every span of an answer, with one additional forward pass.

    Args:
        engine: the engine that answered, or one with the same model.
        without_context: the prompt without the context, as text or token ids.
        with_context: the prompt that was answered. The statistics with the context are then measured again, in a second
            pass. This is required if logits processors, such as a repetition penalty, changed the answer's
            log-probabilities (``generation.processed``).

    Returns:
        The lift of each of ``generation.spans``.

    Raises:
        ConfigError: logits processors were applied to the answer, and ``with_context`` is not given.
        PromptError: a prompt is empty, or a prompt and the answer do not fit the context window.
        NonFiniteLogitsError: the model's logits are NaN or infinite.
    """
    if generation.processed and with_context is None:
        raise ConfigError(
            "a repetition penalty or another logits processor was applied to this answer, so its log-probabilities are "
            "not the model's own; pass the prompt that was answered as with_context= to measure them again."
        )
    spans = [span.token_ids for span in generation.spans]
    without = _measured(engine.session, without_context, spans, generation.config)
    measured = generation.spans
    if with_context is not None:
        measured = _measured(engine.session, with_context, spans, generation.config)
    return [ContextLift.between(*both) for both in zip(measured, without, strict=True)]


def context_lift_of_text(
    engine: CocoaEngine,
    spans: Sequence[str],
    with_context: str | Sequence[int],
    without_context: str | Sequence[int],
    config: CocoaConfig | None = None,
) -> list[ContextLift | None]:
    """The context lift of every span of an answer that is given as text, with two forward passes.

    The text is tokenized again, as by :meth:`CocoaEngine.score`. A token belongs to the span in which it ends.

    Args:
        engine: any engine; it need not have generated the text.
        spans: the texts of the spans. Their concatenation is the answer.
        with_context, without_context: the prompt with the context, and without it.
        config: the settings; layers and ``span_log_prob`` are used. Default: the engine's.

    Returns:
        The lift of each of ``spans``; `None` for a span in which no token ends, such as an empty one.

    Raises:
        PromptError, NonFiniteLogitsError: as for :func:`context_lift`.
    """
    config = engine.config if config is None else config
    session, text = engine.session, "".join(spans)
    before = prompt_ids(session.model, session.tokens, with_context)
    token_ids, _ = text_ids(session.model, session.tokens, with_context, before, text, "answer")
    decoded, ends = token_ends(session.tokens, token_ids)
    dropped = text[0].isspace() and not decoded[:1].isspace()  # some decoders leave out a text's first space
    limits = list(accumulate(map(len, spans)))
    ids: list[list[int]] = [[] for _ in spans]
    end = ends[-1]
    for at in reversed(range(len(token_ids))):
        if ends[at] > (ends[at - 1] if at else 0):  # otherwise the next token completes its characters
            end = ends[at]
        ids[min(bisect_left(limits, end + dropped), len(spans) - 1)].insert(0, token_ids[at])
    with_source, without_source = (
        iter(_measured(session, prompt, [of_span for of_span in ids if of_span], config))
        for prompt in (with_context, without_context)
    )
    return [ContextLift.between(next(with_source), next(without_source)) if of_span else None for of_span in ids]


def _measured(
    session: Session, prompt: Prompt, spans: list[list[int]], config: CocoaConfig, passages: Sequence[range] = ()
) -> list[Span]:
    """The statistics of spans that follow a prompt and one another, in one forward pass."""
    if not spans:
        return []
    model = session.model
    capture = capture_spec(model, config)._replace(early=(), masked=())
    before = prompt_ids(model, session.tokens, prompt)
    text = [token_id for span in spans for token_id in span]
    require_fits(model, len(before), len(text))
    return score_spans(model, before, text, [len(span) for span in spans], config, capture, passages)


def passage_attention(engine: CocoaEngine, generation: Generation, prompt: Prompt, source: Source) -> list[list[float]]:
    """The attention of every span of an answer on each passage of its prompt, by feeding the answer again.

    What the prefix cache has of the prompt is not fed again. ``engine.generate(..., source=...)`` measures the same
    while the answer is written, where the passages are known before.

    Args:
        engine: the engine that answered, or one with the same model.
        prompt: the prompt that was answered, as text or token ids.
        source: the passages, as for :meth:`CocoaEngine.generate`.

    Returns:
        For each of ``generation.spans`` its ``passage_attention``: one value in [0, 1] for each passage; empty if the
        model's retrieval heads are not known, or its attention cannot be seen.

    Raises:
        ConfigError: a passage is not in the prompt.
        PromptError, NonFiniteLogitsError: as for :func:`context_lift`.
    """
    session = engine.session
    before = prompt_ids(session.model, session.tokens, prompt)
    passages = passage_positions(session.tokens, prompt, before, source)
    spans = [span.token_ids for span in generation.spans]
    config = generation.config
    if not spans or not isinstance(session.backend, SharedCache):  # the others would run a pass for each token
        return [span.passage_attention for span in _measured(session, before, spans, config, passages)]
    text = [token_id for span in spans for token_id in span]
    require_fits(session.model, len(before), len(text))
    capture = capture_spec(session.model, config)._replace(early=(), masked=())
    rows: list[Sequence[float]] = []
    with fed(session.backend, before, [text], capture, passages=passages) as steps:
        for step in steps:
            rows += step.output.passages
    ranges = pairwise(accumulate(map(len, spans), initial=0))
    return [passage_means(rows[start:end]) for start, end in ranges]
