"""The comparison of all architectures (``make architectures``), on a few of them, and what it would say of faults."""

import re
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from tests.architectures.__main__ import MARKED, PAGE, counts, document
from tests.architectures.small_configs import MODEL_TYPES, small_model
from tests.architectures.sweep import DifferentError, Outcome, difference, examine
from tests.helpers.reference import FullForward, Reference
from tests.helpers.tiny_models import engine_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "backend", "attention"),
    [
        ("llama", "shared_cache/", "seen"),
        ("roberta-prelayernorm", "recompute/", "seen"),  # its final norm is outside of its encoder
        ("modernbert-decoder", "shared_cache/", "seen"),  # its ``get_decoder`` is its output layer
        ("gpt_oss", "shared_cache/masked_modules", "seen"),  # with attention sinks
        ("deepseek_v3", "shared_cache/masked_modules", "seen"),
        ("llama4_text", "copied_cache/plain", "seen"),
        ("jamba", "copied_cache/plain", "seen"),  # one layer of six attends
        ("bloom", "copied_cache/plain", "not seen"),  # its attention is its own
        ("mamba", "copied_cache/plain", "none"),
        ("qwen2_5_vl", "shared_cache/", "seen"),
        ("mistral3", "shared_cache/", "seen"),
        ("smolvlm", "shared_cache/", "seen"),
    ],
)
def test_the_engine_is_equal_to_the_reference(model_type: str, backend: str, attention: str) -> None:
    """And measures source attention, in every way to run a model."""
    outcome = examine(model_type)
    assert (outcome.verdict, outcome.reason if outcome.verdict != "equal" else "") == ("equal", "")
    assert outcome.backend.startswith(backend)
    assert (outcome.compared, outcome.attention) == (18, attention)


@pytest.mark.parametrize(
    ("model_type", "verdict", "reason"),
    [
        ("gemma3n_text", "refused", r"UnsupportedModelError: .*several residual streams"),
        ("mllama", "refused", r"UnsupportedModelError: .*decoder layer 4 does not run in every forward pass"),
        ("xlnet", "refused", r"UnsupportedModelError: .*attends in both directions"),
        ("musicgen", "not buildable", ".+"),
    ],
)
def test_what_cannot_be_measured_or_built(model_type: str, verdict: str, reason: str) -> None:
    outcome = examine(model_type)
    assert outcome.verdict == verdict
    assert re.match(reason, outcome.reason)


def test_layers_with_other_numbers_of_heads() -> None:
    """transformers refuses to read the number of heads of such a config."""
    engine = engine_of(small_model("dots3_note_text"))
    with pytest.raises(Exception, match="per-layer attribute"):
        _ = engine.model.config.num_attention_heads
    assert len(engine.generate([5, 6, 7], max_new_tokens=2).token_ids) == 2


def test_a_wrong_answer_is_seen() -> None:
    model: PreTrainedModel = small_model("llama")
    engine = engine_of(model)
    answer = engine.generate([5, 6, 7, 8], max_new_tokens=6, gamma=0.2)
    expected = Reference(FullForward(model), engine.tokenizer, answer.config).generate([5, 6, 7, 8])
    assert difference(answer, expected) < 1e-4
    span = answer.spans[-1]
    wrong_span = span.model_copy(update={"f_mlds": span.f_mlds + 0.01})
    for wrong in ({"token_ids": [*answer.token_ids[:-1], 299]}, {"spans": [*answer.spans[:-1], wrong_span]}):
        with pytest.raises(DifferentError):
            difference(answer.model_copy(update=wrong), expected)


def test_the_table_counts_every_outcome() -> None:
    first = Outcome("a", "equal", "AForCausalLM", "shared_cache/modules", attention="seen")
    outcomes = [
        first,
        replace(first, model_type="b", backend="copied_cache/plain", in_float64=True),
        replace(first, model_type="c", verdict="refused", reason="UnsupportedModelError: no | heads"),
        replace(first, model_type="d", verdict="different", reason="tokens [1], expected [2]"),
    ]
    text = document(outcomes)
    assert "**2 equal** to the reference: 1 by the modules; slower: 1 by copied cache." in text
    assert "measured in 2 of them" in text
    assert "**1 refused**" in text
    assert "**1 different or failed.**" in text
    assert "| c | AForCausalLM | modules | refused: UnsupportedModelError: no / heads | seen |" in text
    assert len(counts(outcomes)) == 8


def test_the_page_has_every_architecture_and_no_wrong_one() -> None:
    match = MARKED.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None
    rows = [line.split(" | ") for line in match[0].splitlines() if line.startswith("| ")][2:]
    assert {row[0].removeprefix("| ") for row in rows} >= set(MODEL_TYPES)
    assert not [row for row in rows if row[3].startswith(("different", "failed"))]
