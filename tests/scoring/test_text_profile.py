"""Profiles of given texts: the engine's own figures, under every choice of layers, cut into spans as wished."""

import math
import random
from typing import Any, get_args

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, NonFiniteLogitsError, PromptError
from cocoa_engine.equations import SpanLogProb
from cocoa_engine.execution.backends import Backend
from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.measured import answer, force, spans, tokens
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.scoring.text_tree import CandidateGrower
from cocoa_engine.spans import Candidate
from tests.helpers.alike import near
from tests.helpers.inside import assert_idle
from tests.helpers.tiny_models import pieces_tokenizer, tiny_model, tiny_tokenizer

PROMPT = "Question: What is the capital of Australia?\nAnswer:"
TEXTS = [" Canberra, of course.", " Sydney.", " Canberra."]
FINALS = ("post_norm", "pre_norm")
TOKEN_FIGURES = ("log_probs", "entropies", "margins")


def record(text: str, *parts: tuple[int, int], id: str = "1", label: bool | None = True) -> LabelledText:
    return LabelledText(id, PROMPT, text, "?", label, tuple(LabelledSpan(*part) for part in parts), PROMPT)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "mamba", "opt", None])
def test_the_engines_figures(architecture: str | None, engine: CocoaEngine) -> None:
    engine = CocoaEngine(tiny_model(architecture), tiny_tokenizer()) if architecture else engine
    layers = engine.info().num_layers
    profiles = Profiler(engine.session, CocoaConfig())(PROMPT, TEXTS)
    for final in FINALS:
        for window in ((layers // 3, 2 * layers // 3), (0, layers - 1), (3, 4)):
            scored = engine.score(PROMPT, TEXTS, final_layer=final, middle_layers=window)
            for profile, one in zip(profiles, scored, strict=True):
                (span,) = one.spans
                whole = profile.span(0, len(profile.token_ids))
                assert profile.token_ids == span.token_ids
                for name in TOKEN_FIGURES:
                    assert getattr(profile, name) == near(getattr(span, f"token_{name}"))
                assert float(whole.con_mlds(window)) == near(span.con_mlds)
                assert float(whole.f_mlds(window, final)) == near(span.f_mlds)


def test_what_a_greedy_decode_takes_competes_as_in_the_decode() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    generation = engine.generate([5, 6, 7, 8], max_new_tokens=30, method="greedy")
    text = [token_id for span in generation.spans for token_id in span.token_ids]
    (profile,) = Profiler(engine.session, CocoaConfig())([5, 6, 7, 8], [text])
    starts = [0]
    for span in generation.spans:
        starts.append(starts[-1] + len(span.token_ids))
    cuts = [at for at in range(len(text)) if at == 0 or profile.competing[at] > 1]
    assert cuts == starts[:-1]
    assert profile.gaps == [0.0] * len(text)
    for competing, margin, spread in zip(profile.competing, profile.margins, profile.spreads, strict=True):
        assert (competing > 1) == (margin <= -math.log(0.3))
        assert spread >= (margin if competing > 1 else 0)


def test_spans_cover_the_answer_and_carry_its_labels(engine: CocoaEngine) -> None:
    text = "It is Sydney, the largest city."
    (forced,) = force(engine, [record(text, (6, 12))], CocoaConfig())
    assert forced.ends[-1] == len(text)
    cut = list(spans(forced))
    assert [one.start for one in cut[1:]] == [one.end for one in cut[:-1]]
    assert (cut[0].start, cut[-1].end) == (0, len(forced.profile.token_ids))
    assert sum(one.hallucinated for one in cut) == len("Sydney")
    assert sum(one.hallucinated + one.supported for one in cut) == len(text.replace(" ", ""))
    assert sum(token.hallucinated for token in tokens(forced)) == len("Sydney")
    marked = "".join(
        text[forced.ends[at - 1] if at else 0 : forced.ends[at]]
        for at, token in enumerate(tokens(forced))
        if token.hallucinated
    )
    assert marked.strip() == "Sydney"
    whole = answer(forced)
    assert (whole.hallucinated, whole.supported, whole.start, whole.end) == (1, 0, 0, len(forced.ends))


@pytest.mark.parametrize("text", ["the thé", " the日 a", "日 é\n a"])
@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces_tokenizer])
def test_offsets_where_decoders_drop_spaces_and_split_characters(tokenizer: object, text: str) -> None:
    engine = CocoaEngine(tiny_model("llama"), tokenizer())  # type: ignore[operator]
    answers = [record(text, (0, len(text))), record(text + " a", (0, 1), id="2")]
    for forced in force(engine, answers, CocoaConfig()):
        assert forced.ends[-1] == len(forced.record.text)
        assert forced.ends == sorted(forced.ends)
        visible = [character for character in forced.record.text if not character.isspace()]
        assert sum(token.hallucinated + token.supported for token in tokens(forced)) == len(visible)


def test_a_chat_gives_other_figures_but_the_same_characters(engine: CocoaEngine) -> None:
    one = [record("Canberra.", (0, 8))]
    (plain,), (chat,) = (force(engine, one, CocoaConfig(), chat=chat) for chat in (False, True))
    assert chat.profile.log_probs != plain.profile.log_probs
    assert chat.ends[-1] == plain.ends[-1] == len("Canberra.")
    with pytest.raises(PromptError, match="context window"):
        list(force(engine, [record("word " * 9000)], CocoaConfig()))


# --- the candidates grown on a text are those that a decode would weigh there, however they are fed

START = [5, 6, 7, 8]
ARCHITECTURES = ("llama", "mistral-sliding", "gemma3_text", "gpt2", "phi", "qwen3", "mamba")
RULES = get_args(SpanLogProb)


def decoded(engine: CocoaEngine, prompt: list[int], text: list[int], config: CocoaConfig) -> list[list[Candidate]]:
    """What a decode weighs at each token of a text, from a prompt that holds what is before it."""
    found = []
    for at in range(len(text)):
        settings = config.replace(max_new_tokens=config.max_span_tokens)
        with engine.stream([*prompt, *text[:at]], config=settings) as stream:
            found.append(next(stream).candidates)
    return found


def assert_alike(grown: list[list[Candidate]], expected: list[list[Candidate]]) -> None:
    for each, others in zip(grown, expected, strict=True):
        for one, other in zip(each, others, strict=True):
            for name in ("token_ids", "text", "is_greedy", "ends_answer"):
                assert getattr(one, name) == getattr(other, name)
            for figure in ("log_prob", "con_mlds", "f_mlds", "score", *(f"token_{each}" for each in TOKEN_FIGURES)):
                assert getattr(one, figure) == pytest.approx(getattr(other, figure), abs=2e-3)


def some_text(engine: CocoaEngine, prompt: list[int], tokens: int) -> list[int]:
    """A text that keeps to what is likely, but for every fifth token."""
    dice = random.Random(0)
    text: list[int] = []
    while len(text) < tokens:
        rest = engine.generate([*prompt, *text], max_new_tokens=4).token_ids
        text += [*rest, dice.randrange(3, 200)]
    return text[:tokens]


@pytest.mark.parametrize("boundary", ["right", "own"])
def test_as_a_decode_weighs_them_on_the_real_model(engine: CocoaEngine, boundary: str) -> None:
    config = CocoaConfig(span_boundary=boundary, max_span_tokens=6, metric="con_mlds")
    prompt = engine.encode("Rivers of Europe, the longest first:")
    texts = [engine.encode(text) for text in (" the Volga, the Danube", " the Volga and the Nile", " Rhine")]
    found = CandidateGrower(engine.session, config)(prompt, texts)
    assert sum(bool(each) for grown in found for each in grown) > 8
    for grown, text in zip(found, texts, strict=True):
        assert_alike(grown, decoded(engine, prompt, text, config))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "rule"), [*zip(ARCHITECTURES, RULES, strict=True)])
def test_on_other_architectures_by_each_rule_without_a_shared_cache_and_piece_by_piece(
    architecture: str, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CocoaEngine(tiny_model(architecture), tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, span_boundary="own", span_log_prob=rule)
    text = some_text(engine, START, 14)
    texts = [text, text[:6], [*text[:3], 9, 10]]
    found = CandidateGrower(engine.session, config)(START, texts)
    assert any(len({len(one.token_ids) for one in candidates}) > 1 for candidates in found[0])
    monkeypatch.setattr(Backend, "paths_per_step", 6)
    in_pieces = CandidateGrower(engine.session, config)(START, texts)
    for grown, again, one in zip(found, in_pieces, texts, strict=True):
        assert_alike(grown, decoded(engine, START, one, config))
        assert_alike(again, grown)


def test_branches_end_with_the_context_window() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=24), tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, gamma=0.05)
    text = some_text(engine, START, 12)
    text += [*some_text(engine, [*START, *text], 4), 9, 10, 11, 12]
    assert engine.context_window == len(START) + len(text)
    (grown,) = CandidateGrower(engine.session, config)(START, [text])
    assert all(len(one.token_ids) <= len(text) - at for at, each in enumerate(grown) for one in each)
    assert_alike(grown[-4:], decoded(engine, START, text, config)[-4:])


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_logits_that_are_no_numbers_of_a_branch_and_of_the_prompt(architecture: str) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, gamma=0.05)
    text = some_text(engine, START, 6)
    (grown,) = CandidateGrower(engine.session, config)(START, [text])
    rivals = [one.token_ids[0] for each in grown for one in each if one.token_ids[0] not in [*START, *text]]
    with torch.no_grad():
        model.get_input_embeddings().weight[rivals[0]] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="of the sequence"):
        CandidateGrower(engine.session, config)(START, [text])
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="token 4 of the sequence"):
        CandidateGrower(engine.session, CocoaConfig())(START, [[5, 6]])
    if architecture == "llama":  # the other holds no cache of the engine's
        assert_idle(engine)
