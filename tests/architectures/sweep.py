"""Compares the engine with the tests' naive reference on a small model of one architecture."""

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, CocoaError, Generation
from cocoa_engine.methods.retrieval_heads import source_heads
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.spans import Measured
from tests.architectures.small_configs import small_model
from tests.helpers.attention import attention_weights, mass_on_prompt, source_attention
from tests.helpers.reference import Figures, FullForward, Reference, ReferenceGeneration
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_tokenizer

Verdict = Literal["equal", "different", "failed", "refused", "no reference", "not buildable"]

KNIFE_EDGE = 1e-3
"""A decision nearer than this may fall either way by rounding: another prompt is taken."""

TOLERANCE = 1e-3
"""Largest difference of a value between the engine and the reference, relative where the value is large."""

METHODS: dict[str, dict[str, Any]] = {
    "cocoa-sig": {"max_new_tokens": 8, "gamma": 0.2, "max_candidates": 4, "max_span_tokens": 6},
    "greedy": {"max_new_tokens": 10},
}
LENGTHS = (9, 1, 23)  # of the prompts, in tokens; longer and shorter than the sliding windows
TRIES = 12
"""Prompts of each length at most, if decisions on a knife edge rule some out."""

_VALUES = ("token_log_probs", "token_entropies", "token_margins", "log_prob", "con_mlds", "f_mlds", "score")


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    ``"failed"``: an error that is none of the engine's own. ``"refused"``: one of its own. ``"no reference"``: a plain
    forward pass gives no hidden states. ``"not buildable"``: transformers cannot build or run the small model.
    """

    model_type: str  # its name in transformers
    verdict: Verdict
    model_class: str = ""
    backend: str = ""  # the chosen backend and forward pass, such as ``"shared_cache/lean"``
    compared: int = 0  # number of compared answers
    difference: float = 0.0  # the largest of a value
    attention: str = ""  # whether source attention is measured, as attention weights and scored texts have it
    in_float64: bool = False  # values were compared in float64, because float32 rounds too much in this model
    reason: str = ""  # for the other verdicts, and why a slower backend was chosen


class DifferentError(AssertionError):
    """The engine's answer is not the reference's."""


class NoReferenceError(Exception):
    """The model's plain forward pass gives no hidden states, or not the same twice."""


def examine(model_type: str) -> Outcome:
    """Build a small model, and compare the engine's answers with the reference's."""
    warnings.simplefilter("ignore")
    try:
        model = small_model(model_type)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(5, 17)[None]).logits
        if not torch.isfinite(logits).all():
            raise ValueError("with random weights the logits are not finite")
    except Exception as error:
        return Outcome(model_type, "not buildable", reason=_named(error))
    return _examined(model_type, model)


def _examined(model_type: str, model: Any) -> Outcome:
    name = type(model).__name__
    try:
        engine = CocoaEngine(model, tiny_tokenizer())
        info = engine.info()
        engine.generate(_prompt(0, 5), max_new_tokens=2)
    except CocoaError as error:
        return Outcome(model_type, "refused", name, reason=_named(error))
    except Exception as error:
        return Outcome(model_type, "failed", name, reason=_named(error))
    chosen = (name, f"{info.backend}/{info.forward}")
    try:
        forward = _reference_pass(model)
    except NoReferenceError as error:
        return Outcome(model_type, "no reference", *chosen, reason=_named(error))
    compared, difference = 0, 0.0
    try:
        for off in _compare(engine, forward):
            compared, difference = compared + 1, max(difference, off)
        attention = _attention(engine)
    except DifferentError as error:
        if (
            model.dtype != torch.float64
            and (exact := _examined(model_type, model.to(torch.float64))).verdict == "equal"
        ):
            return replace(exact, backend=chosen[1], in_float64=True)
        return Outcome(model_type, "different", *chosen, compared, difference, reason=str(error))
    except Exception as error:
        return Outcome(model_type, "failed", *chosen, compared, difference, reason=_named(error))
    reason = "" if info.backend == "shared_cache" else info.backend_reason
    return Outcome(model_type, "equal", *chosen, compared, difference, attention, reason=reason)


def _reference_pass(model: Any) -> FullForward:
    """The reference's forward pass, if the model gives what it needs."""
    try:
        forward, again = FullForward(model), FullForward(model)
        first, second = (run(_prompt(1, 6), _prompt(2, 3)) for run in (forward, again))
    except Exception as error:
        raise NoReferenceError(_named(error)) from error
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise NoReferenceError("two forward passes over the same tokens differ")
    if first[1].isnan().any():
        raise NoReferenceError("the hidden states are not finite")
    return forward


def _compare(engine: CocoaEngine, forward: FullForward) -> Iterator[float]:
    """Decode prompts alone, in a batch and as a stream; the largest difference of each answer."""
    for method, settings in METHODS.items():
        config = CocoaConfig(method=method, **settings)
        wanted: list[tuple[list[int], ReferenceGeneration]] = []
        for length in LENGTHS:
            prompts = [_prompt(seed, length) for seed in range(TRIES)]
            references = ((prompt, Reference(forward, engine.tokenizer, config).generate(prompt)) for prompt in prompts)
            wanted += islice((pair for pair in references if pair[1].margin >= KNIFE_EDGE), 1)
        if not wanted:
            raise DifferentError("every decision of every prompt is on a knife edge")
        prompts = [prompt for prompt, _ in wanted]
        answers = [engine.generate(prompt, config=config) for prompt in prompts]
        answers += engine.generate_batch(prompts, config=config)
        for prompt in prompts:
            with engine.stream(prompt, config=config) as stream:
                list(stream)
            answers += [] if stream.generation is None else [stream.generation]
        for answer, (_, expected) in zip(answers, wanted * 3, strict=True):
            yield difference(answer, expected)


def _attention(engine: CocoaEngine) -> str:
    """How source attention is measured. It must be that of the attention weights, and of the text as a given one."""
    heads = source_heads(None, LanguageModel(engine.model))
    if not heads:
        return "none"
    for length in LENGTHS:
        prompt = _prompt(0, length)
        if len(prompt) == 1:  # it has no source
            continue
        answer = engine.generate(prompt, max_new_tokens=8, gamma=0.2)
        measured, given = map(source_attention, (answer, engine.score(prompt, answer.token_ids)))
        if not measured and not given:
            return "not seen"
        weights = _from_weights(engine.model, heads, prompt, answer.token_ids)
        for expected in (given, given if weights is None else weights):
            if measured != pytest.approx(expected, abs=TOLERANCE):
                raise DifferentError(f"source attention {measured}, expected {expected}")
    return "seen"


def _from_weights(
    model: Any, heads: Sequence[tuple[int, int]], prompt: list[int], text: list[int]
) -> list[float] | None:
    """The mean mass on the prompt after its first token; `None` if the model does not return all weights."""
    try:
        layers = attention_weights(model, [*prompt, *text])
        sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
        if sinks and torch.allclose(layers[-1].sum(-1), torch.ones(())):
            return None  # the share of the sinks is left out
        return mass_on_prompt(layers, heads, len(prompt))
    except Exception:  # errors of many types
        return None


def difference(actual: Generation, expected: ReferenceGeneration) -> float:
    """The largest difference of a value. Tokens, spans, candidates and choices are the same, or DifferentError."""
    method, pairs = actual.config.method, list[tuple[Measured, Figures]]()
    decided = [(span.kind, span.token_ids, span.chosen) for span in actual.spans]
    wanted = [(span.kind, span.figures.token_ids, span.chosen) for span in expected.spans]
    if actual.token_ids != expected.token_ids or decided != wanted or actual.finish_reason != expected.finish_reason:
        raise DifferentError(f"{method}: tokens {actual.token_ids}, expected {expected.token_ids}")
    for span, reference in zip(actual.spans, expected.spans, strict=True):
        if [each.token_ids for each in span.candidates] != [each.token_ids for each in reference.candidates]:
            raise DifferentError(f"{method}: other candidates")
        pairs += [(span, reference.figures), *zip(span.candidates, reference.candidates, strict=True)]
    worst = 0.0
    for measured, figures in pairs:
        for name in _VALUES:
            values, references = getattr(measured, name), getattr(figures, name)
            if not isinstance(values, list):
                values, references = [values], [references]
            for value, reference_value in zip(values, references, strict=True):
                off = abs(value - reference_value) / max(1.0, abs(reference_value))
                if not off <= TOLERANCE:
                    raise DifferentError(f"{method}: {name} {value:.6g}, expected {reference_value:.6g}")
                worst = max(worst, off)
    return worst


def _prompt(seed: int, length: int) -> list[int]:
    dice = random.Random(seed * 1000 + length)
    return [dice.randrange(5, VOCAB_SIZE) for _ in range(length)]


def _named(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
