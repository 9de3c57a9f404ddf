"""``method="sample"``: the distribution of transformers' sampling, greedy at its limits, the same in batches.

The registry of decoding methods: `MethodName`, the files of `cocoa_engine.methods` and `METHODS` agree.
"""

import re
from collections import Counter
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine, ConfigError, Generation, methods
from cocoa_engine.config import MethodName
from cocoa_engine.decoding.next_tokens import Sampler, next_tokens
from cocoa_engine.methods import DecodingMethod
from cocoa_engine.methods.sample import Sample
from tests.helpers.alike import assert_alike, near
from tests.helpers.backends import plain
from tests.helpers.processes import python
from tests.helpers.tiny_models import engine_for_schemas, engine_of, prompt, tiny_model

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.4},
]


def sampled(engine: CocoaEngine, given: list[int], **settings: Any) -> Generation:
    return engine.generate(
        given, **{"method": "sample", "temperature": 1.0, "max_new_tokens": 20, "seed": 1, **settings}
    )


def expected_distribution(engine: CocoaEngine, ids: list[int], settings: dict[str, Any]) -> torch.Tensor:
    """softmax of what transformers' own warpers leave of the logits, in the order of ``generate``."""
    config = GenerationConfig(**{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings})
    config.eos_token_id = None
    sequence = torch.tensor([ids])
    processors = engine.model._get_logits_processor(config, input_ids_seq_length=len(ids), device="cpu")
    return processors(sequence, plain(engine.model, ids)[None]).softmax(-1)[0]


def processed_logits(engine: CocoaEngine, ids: list[int], settings: dict[str, Any]) -> torch.Tensor:
    logits = plain(engine.model, ids)[None]
    if penalty := settings.get("repetition_penalty"):
        logits = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits)
    return logits[0]


def draws(logits: torch.Tensor, count: int, settings: dict[str, Any]) -> list[int]:
    """Tokens drawn from one distribution, as those of an answer of ``count`` tokens."""
    config = CocoaConfig(**{"method": "sample", "temperature": 1.0, **settings})
    rows = logits.expand(count, -1)
    sampler = Sampler(Sample(), config, torch.Generator().manual_seed(1), prompt_length=7)
    known = next_tokens(rows, 2)
    return [token.chosen.token_id for token in sampler.drawn(known, rows, range(7, 7 + count))]  # type: ignore[union-attr]


def p_value(counts: Counter[int], expected: torch.Tensor) -> float:
    """Chi-square of drawn tokens, the rare ones (fewer than 5 expected) taken together."""
    total = counts.total()
    assert all(expected[token] > 0 for token in counts), "a token was drawn that must not be"
    observed = np.array([counts[token] for token in range(len(expected))], dtype=float)
    wanted = expected.double().numpy() * total
    common = wanted >= 5
    observed = np.append(observed[common], observed[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    kept = wanted > 0
    observed, wanted = observed[kept], wanted[kept]
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue) if len(wanted) > 1 else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_distribution_of_transformers(settings: dict[str, Any], tiny: CocoaEngine) -> None:
    """And no other one."""
    drawn = Counter(draws(processed_logits(tiny, prompt(0), settings), 5000, settings))
    assert p_value(drawn, expected_distribution(tiny, prompt(0), settings)) > 1e-3
    other = {**settings, "temperature": 1.25 * settings.get("temperature", 1.0)}
    assert p_value(drawn, expected_distribution(tiny, prompt(0), other)) < 1e-6


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 5e-324}, {"top_k": 1}, {"top_p": 1e-9}])
def test_the_limits_are_greedy(settings: dict[str, Any], tiny: CocoaEngine) -> None:
    for number in range(3):
        greedy = tiny.generate(prompt(number), method="greedy", max_new_tokens=20)
        answer = sampled(tiny, prompt(number), **settings)
        assert_alike(answer.model_copy(update={"config": greedy.config}), greedy)


def test_equally_probable_tokens_are_not_drawn_with_top_k_1() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    level = engine_of(model)
    assert sampled(level, prompt(0), top_k=1).token_ids == [0]  # the end token, whose id is the lowest
    assert len(set(sampled(level, prompt(0)).token_ids)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.4, "top_p": 0.9}, {"repetition_penalty": 1.3}])
def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_as_a_stream(
    settings: dict[str, Any], tiny: CocoaEngine
) -> None:
    prompts = [prompt(number, length) for number, length in enumerate((6, 2, 15, 9))]
    settings = {"method": "sample", "temperature": 1.0, "seed": 7, "max_new_tokens": 24, **settings}
    together = tiny.generate_batch(prompts, **settings)
    for given, answer in zip(prompts, together, strict=True):
        alone = tiny.generate(given, **settings)
        assert_alike(alone, answer)
        with tiny.stream(given, **settings) as stream:
            assert [span.token_ids for span in stream] == [span.token_ids for span in alone.spans]
    assert together != tiny.generate_batch(prompts, **settings | {"seed": 8})
    without = [tiny.generate_batch(prompts, **settings | {"seed": None}) for _ in range(2)]
    assert without[0] != without[1]


def test_the_figures_are_those_of_the_models_own_distribution(tiny: CocoaEngine) -> None:
    answer = sampled(tiny, prompt(5), temperature=2.0, top_k=30, top_logprobs=3)
    given = tiny.score(prompt(5), answer.token_ids, method="sample")
    log_probs = [value for span in answer.spans for value in span.token_log_probs]
    assert log_probs == near(given.spans[0].token_log_probs)
    assert min(log_probs) < -3, "no improbable token was drawn"
    for span in answer.spans:
        assert (span.kind, span.candidates, span.chosen) == ("greedy", [], None)
        assert span.score == span.log_prob == pytest.approx(sum(span.token_log_probs))
        assert 0 < span.f_mlds < 2
        top = [row[0][1] for row in span.top_log_probs or []]
        assert all(best >= taken - 1e-6 for best, taken in zip(top, span.token_log_probs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.9, "top_k": 40}])
def test_a_grammar_holds(settings: dict[str, Any]) -> None:
    constrained = engine_for_schemas()
    words = constrained.constrain(regex="(yes|no), (I|you) (can|must)")
    prompts = [prompt(number) for number in range(6)]
    together = constrained.generate_batch(prompts, method="sample", seed=4, logits_processor=words, **settings)
    assert all(re.fullmatch("(yes|no), (I|you) (can|must)", answer.text) for answer in together)
    assert len({answer.text for answer in together}) > 1


def test_names_classes_and_files_agree():
    assert list(METHODS) == list(get_args(MethodName))
    defined = set()
    for file in iter_modules(methods.__path__):
        module = import_module(f"cocoa_engine.methods.{file.name}")
        kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, DecodingMethod)]
        defined |= {kind for kind in kinds if kind.__module__ == module.__name__ and file.name != "base"}
    assert defined == {type(method) for method in METHODS.values()}
    for name, method in METHODS.items():
        assert method.name == name
        assert type(method).__module__ == f"cocoa_engine.methods.{name.replace('-', '_')}"


def test_unknown_methods_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'coca' .*mean 'cocoa'\?\); known are greedy, cocoa,"):
        CocoaConfig(method="coca")
    with pytest.raises(ConfigError, match="method: Input should be 'greedy', 'cocoa'"):
        CocoaConfig(method=None)


def test_settings_methods_names_for_integrations_and_a_calibrator_load_without_torch() -> None:
    modules = "cocoa_engine.config, cocoa_engine.methods, cocoa_engine.integration, cocoa_engine.report"
    heavy = {"torch", "transformers", "numpy", "tokenizers", "rich", "typer", "llguidance", "jsonschema"}
    heavy |= {"sklearn", "scipy", "matplotlib"}
    code = (
        f"import sys, {modules}; from cocoa_engine import RiskCalibrator;"
        "c = RiskCalibrator.load('embedded'); c.span([0.0] * len(c.span.features));"
        f"print(sorted({heavy} & sys.modules.keys()))"
    )
    assert python(code).strip() == "[]"
