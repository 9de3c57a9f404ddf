"""A request: the checked settings, prompt and rules of one call."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from cocoa_engine.arguments import given_or_new, of_type
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.next_tokens import Sampler
from cocoa_engine.equations import middle_layers
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_engine.execution.backends import Path
from cocoa_engine.execution.backends.shared_cache import SPARE_SLOTS
from cocoa_engine.execution.session import Session
from cocoa_engine.interruptions import Cancellation, at_work
from cocoa_engine.methods import METHODS, SamplingMethod
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.callables import Criteria, Criterion, Processor, Processors
from cocoa_engine.model.generation_config import eos_token_ids, logits_processors, stop_texts
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel
from cocoa_engine.model.prompts import ChatTokens, Prompt, Source, passage_positions, prompt_ids, require_room
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.timeline import Timeline

FREE_LEAVES = 8
"""Number of leaves that one pass feeds at little more than the cost of one, for all sequences in the pass together."""


@dataclass
class Rules:
    """The rules of one request.

    Attributes:
        config: the settings, with ``max_new_tokens`` limited to the context window.
        eos: token ids that end the text.
        stop_texts, stop_ids: texts that end the answer and are cut off, and ids of those that are special tokens.
        processors: transformers logits processors, called as ``(ids [1, t], logits [1, V])`` before the softmax.
        criteria: transformers stopping criteria, called as ``(ids [1, t], None)`` after each token. True ends the text.
        window_left: the number of tokens left in the context window after the prompt; `None`: no limit.
            Branches may grow beyond ``max_new_tokens``, but not beyond this.
        generator: the random generator that samples a branch if ``temperature`` is above 0, otherwise `None`.
        sampler: draws the tokens of the answer, for a sampling method with ``temperature`` above 0.
    """

    config: CocoaConfig
    eos: frozenset[int]
    stop_texts: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    processors: Sequence[Processor] = ()
    criteria: Sequence[Criterion] = ()
    window_left: int | None = None
    generator: torch.Generator | None = None
    sampler: Sampler | None = None

    def processed(self, prefix: Sequence[int], paths: Sequence[Path], scores: Tensor) -> Tensor:
        """Apply the logits processors, in order, to each row of scores, ``[W, V]``.

        Args:
            prefix: the token ids before all paths, prompt included.
            paths: for each row, the token ids between the prefix and the next token.
        """
        rows = []
        for path, row in zip(paths, scores, strict=True):
            ids, processed = torch.tensor([[*prefix, *path]], device=row.device), row[None]
            for processor in self.processors:
                processed = processor(ids, processed)
                if not isinstance(processed, Tensor) or processed.shape != row[None].shape:
                    raise ConfigError(
                        f"the logits processor {type(processor).__name__} must return a tensor of the same shape as "
                        f"its scores, {list(row[None].shape)}."
                    )
            rows.append(processed)
        return torch.cat(rows)

    def criteria_met(self, prefix: Sequence[int], path: Path) -> bool:
        """Whether a stopping criterion ends the text after ``path``, which follows ``prefix``."""
        for criterion in self.criteria:
            met = criterion(torch.tensor([[*prefix, *path]], device="cpu"), None)
            if not isinstance(met, (bool, Tensor)):
                raise ConfigError(
                    f"the stopping criterion {type(criterion).__name__} must return a bool or a bool tensor."
                )
            if bool(met.all() if isinstance(met, Tensor) else met):
                return True
        return False


T = TypeVar("T")


@dataclass(frozen=True)
class PerPrompt(Generic[T]):
    """Logits processors or stopping criteria for each prompt of a batch, in the order of the prompts."""

    each: Sequence[T]


def for_each(values: T | PerPrompt[T], count: int) -> Sequence[T]:
    """The processors or criteria of each of ``count`` prompts; :class:`.ConfigError` if there are more or fewer."""
    each = values.each if isinstance(values, PerPrompt) else [values] * count
    if len(each) != count:
        raise ConfigError(f"processors or criteria are given for {len(each)} prompts; there are {count}.")
    return each


@dataclass(frozen=True)
class Request:
    """One checked request.

    Attributes:
        prompt: token ids, at least one.
        config: the settings as the user gave them.
        capture: the hidden states that every step returns.
        reserve_tokens: the number of tokens beyond the prompt to reserve memory for, dropped branches included.
        passages: the positions of the passages of the prompt whose attention mass is measured.
        question_tokens: the length of the prompt without the earlier exchange of a chat; `None` without one.
    """

    prompt: list[int]
    config: CocoaConfig
    rules: Rules
    capture: CaptureSpec
    reserve_tokens: int
    cancellation: Cancellation = field(default_factory=Cancellation)
    passages: tuple[range, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)
    question_tokens: int | None = None


@at_work
def make_request(
    session: Session,
    prompt: Prompt,
    config: CocoaConfig,
    calibrator: RiskCalibrator | None = None,
    processors: Processors = None,
    criteria: Criteria = None,
    generation_config: GenerationConfig | None = None,
    cancellation: Cancellation | None = None,
    source: Source | None = None,
    timeline: Timeline | None = None,
    ignored_ends: Collection[int] = (),
) -> Request:
    """Check a prompt and its settings, and make a request of them.

    The arguments are those of :meth:`CocoaEngine.generate`. The calibrator's heads and probes are measured.
    """
    if generation_config is not None:
        of_type(generation_config, GenerationConfig, "generation_config")
    cancellation = given_or_new(cancellation, Cancellation, "cancellation")
    timeline = given_or_new(timeline, Timeline, "timeline")
    model, tokens, method, asked = session.model, session.tokens, METHODS[config.method], config
    capture = capture_spec(model, config, calibrator)
    ids = prompt_ids(model, tokens, prompt)
    passages = passage_positions(tokens, prompt, ids, source)
    window, left = model.context_window, None
    require_room(window, len(ids))
    if window is not None:
        left = window - len(ids) * (2 if method.reads_back else 1)
        if left < 1:
            raise PromptError(
                f"the prompt has {len(ids)} tokens and method={config.method!r} reads it twice: the model's context "
                f"window is {window}. Shorten the prompt to less than half of it."
            )
        config = config.replace(max_new_tokens=min(config.max_new_tokens, left))
    generator, sampler = None, None
    if config.temperature > 0:
        generator = torch.Generator()
        generator.manual_seed(model.fresh_seed() if config.seed is None else config.seed)
        if isinstance(method, SamplingMethod) and config.top_k != 1:  # 1 is greedy, also between equal tokens
            sampler = Sampler(method, config, generator, len(ids))
    eos = eos_token_ids(model.model, tokens, generation_config).difference(ignored_ends)
    texts = (*config.stop, *stop_texts(model.model, generation_config))
    penalty = config.repetition_penalty or method.repetition_penalty
    of_call = logits_processors(model, eos, ids, config.max_new_tokens, penalty, generation_config)
    for processor in _as_list("logits_processor", processors):
        # a grammar returns a new processor, because it tracks its state in the answer
        for_prompt = getattr(processor, "for_prompt", None)
        of_call.append(processor if for_prompt is None else cancellation.run(for_prompt, ids))
    stops = {stop: tokens.special_token_id(stop) for stop in texts}
    rules = Rules(
        config=config,
        eos=eos,
        stop_texts=tuple(stop for stop, token_id in stops.items() if token_id is None),
        stop_ids=frozenset(token_id for token_id in stops.values() if token_id is not None),
        processors=of_call,
        criteria=_as_list("stopping_criteria", criteria),
        window_left=left,
        generator=generator,
        sampler=sampler,
    )
    branching = method.branches and config.gamma < 1 and config.max_candidates > 1
    # guesses fill a pass with fewer branches
    leaves = max(min(config.max_candidates, model.vocab_size), FREE_LEAVES) if branching else 0
    span = config.max_span_tokens if left is None else min(config.max_span_tokens, left)
    reserve = config.max_new_tokens + min(leaves * span, SPARE_SLOTS)
    return Request(
        ids,
        asked,
        rules,
        capture,
        reserve,
        cancellation=cancellation,
        passages=passages,
        timeline=timeline,
        question_tokens=prompt.question_tokens if isinstance(prompt, ChatTokens) else None,
    )


def capture_spec(model: LanguageModel, config: CocoaConfig, calibrator: RiskCalibrator | None = None) -> CaptureSpec:
    """What every step must return in addition to the logits, under the given settings and for the given calibrator.

    Raises:
        ConfigError: the window of middle layers, or the method's layers or heads, do not fit the model.
        UnsupportedModelError: the method masks attention heads, and the model has none.
    """
    first, last = config.middle_layers or middle_layers(model.num_layers)
    if last > model.num_layers:
        raise ConfigError(
            f"middle_layers: n={last} is beyond the model's {model.num_layers} layers; "
            f"choose 0 <= m < n <= {model.num_layers}."
        )
    method = METHODS[config.method]
    read = [first, last, *(probe.layer for probe in (calibrator.probes if calibrator else {}).values())]
    return CaptureSpec(
        min(read),
        max(read),
        config.final_layer,
        early=method.early_layers(config, model),
        masked=method.masked_heads(config, model),
        source_heads=source_heads(config.decore_heads, model, None if calibrator is None else calibrator.heads),
        window=None if first <= min(read) and max(read) <= last else (first, last),
    )


def _as_list(name: str, values: Any) -> list[Any]:
    if values is None:
        return []
    # a transformers list is itself callable, so test for lists first
    values = list(values) if isinstance(values, Sequence) else [values]
    if any(not callable(value) for value in values):
        raise ConfigError(f"{name} must be a transformers processor or criterion (a callable), or a list of them.")
    return values
