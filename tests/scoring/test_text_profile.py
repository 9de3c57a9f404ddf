"""Profiles of given texts: the engine's own figures, under every choice of layers, cut into spans as wished.

Many given texts after one prompt: the figures of each alone, but the prompt is encoded once.
"""

import gc
import math
import random
import weakref
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, NonFiniteLogitsError, PromptError, Runtime, Usage
from cocoa_engine.equations import SpanLogProb
from cocoa_engine.execution.backends import KINDS, Backend
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.measured import answer, force, spans, tokens
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.scoring.text_tree import CandidateGrower
from cocoa_engine.spans import Candidate
from tests.helpers.alike import assert_alike, assert_all_alike, near
from tests.helpers.backends import made
from tests.helpers.inside import assert_idle, hook_count, record, use_backend
from tests.helpers.reference import FullForward, Reference, assert_same
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import RECURRENT, pieces_tokenizer, tiny_model, tiny_tokenizer

PROMPT = "Question: What is the capital of Australia?\nAnswer:"
TEXTS = [" Canberra, of course.", " Sydney.", " Canberra."]
FINALS = ("post_norm", "pre_norm")
TOKEN_FIGURES = ("log_probs", "entropies", "margins")


def labelled_text(text: str, *parts: tuple[int, int], id: str = "1", label: bool | None = True) -> LabelledText:
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
    starts = [0, *accumulate(len(span.token_ids) for span in generation.spans)]
    cuts = [at for at in range(len(text)) if at == 0 or profile.competing[at] > 1]
    assert cuts == starts[:-1]
    assert profile.gaps == [0.0] * len(text)
    for competing, margin, spread in zip(profile.competing, profile.margins, profile.spreads, strict=True):
        assert (competing > 1) == (margin <= -math.log(0.3))
        assert spread >= (margin if competing > 1 else 0)


def test_spans_cover_the_answer_and_carry_its_labels(engine: CocoaEngine) -> None:
    text = "It is Sydney, the largest city."
    (forced,) = force(engine, [labelled_text(text, (6, 12))], CocoaConfig())
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
    answers = [labelled_text(text, (0, len(text))), labelled_text(text + " a", (0, 1), id="2")]
    for forced in force(engine, answers, CocoaConfig()):
        assert forced.ends[-1] == len(forced.record.text)
        assert forced.ends == sorted(forced.ends)
        visible = [character for character in forced.record.text if not character.isspace()]
        assert sum(token.hallucinated + token.supported for token in tokens(forced)) == len(visible)


def test_a_chat_gives_other_figures_but_the_same_characters(engine: CocoaEngine) -> None:
    one = [labelled_text("Canberra.", (0, 8))]
    (plain,), (chat,) = (force(engine, one, CocoaConfig(), chat=chat) for chat in (False, True))
    assert chat.profile.log_probs != plain.profile.log_probs
    assert chat.ends[-1] == plain.ends[-1] == len("Canberra.")
    with pytest.raises(PromptError, match="context window"):
        list(force(engine, [labelled_text("word " * 9000)], CocoaConfig()))


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


def assert_same_candidates(grown: list[list[Candidate]], expected: list[list[Candidate]]) -> None:
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
        assert_same_candidates(grown, decoded(engine, prompt, text, config))


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
        assert_same_candidates(grown, decoded(engine, START, one, config))
        assert_same_candidates(again, grown)


def test_branches_end_with_the_context_window() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=24), tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, gamma=0.05)
    text = some_text(engine, START, 12)
    text += [*some_text(engine, [*START, *text], 4), 9, 10, 11, 12]
    assert engine.context_window == len(START) + len(text)
    (grown,) = CandidateGrower(engine.session, config)(START, [text])
    assert all(len(one.token_ids) <= len(text) - at for at, each in enumerate(grown) for one in each)
    assert_same_candidates(grown[-4:], decoded(engine, START, text, config)[-4:])


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


PROMPT_IDS = list(range(20, 60))
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "mistral-sliding", "gemma3_text", "gpt2", "mamba", "qwen3_next")),
    ("gemma3_text", {"method": "cocoa", "metric": "con_mlds", "span_log_prob": "mean", "final_layer": "pre_norm"}),
    ("gemma3_text", {"middle_layers": (0, 6)}),
]


def random_texts(count: int = 12) -> list[list[int]]:
    """Token ids that often begin alike; the first text twice, and the beginning of another."""
    rng = random.Random(0)
    texts = [[rng.randrange(3, 7) for _ in range(rng.randrange(1, 8))] for _ in range(count)]
    return [*texts, texts[0], texts[1][:1]]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "settings"), CASES)
def test_same_figures_as_alone_and_as_the_reference(architecture: str, settings: dict[str, Any]) -> None:
    model, tokenizer, config = tiny_model(architecture), tiny_tokenizer(), CocoaConfig(**settings)
    engine, reference = CocoaEngine(model, tokenizer), Reference(FullForward(model), tokenizer, config)
    texts = random_texts()
    for text, one in zip(texts, engine.score(PROMPT_IDS, texts, config=config), strict=True):
        assert_alike(one, engine.score(PROMPT_IDS, text, config=config))
        assert_same(one, reference.score(PROMPT_IDS, text))
        count, passes = len(text), 2 if architecture not in RECURRENT else 1 + len(text)
        usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": count, "fed_tokens": count}
        assert one.usage == Usage(**usage, forward_passes=passes)
    assert hook_count(engine.model) == 0


STEPS: list[tuple[str, int, dict[str, Any]]] = [
    *((kind, width, {}) for kind in KINDS for width in (1, 3, 128)),
    ("lean", 9, {"method": "dola", "dola_layers": "1,2"}),  # three rows of a contrast in a step
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width", "settings"), STEPS)
def test_every_way_and_any_width_of_a_step(
    kind: str, width: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    engine, texts = CocoaEngine(model, tiny_tokenizer()), random_texts(8)
    alone = [engine.score(PROMPT_IDS, text, **settings) for text in texts]
    chosen = made(model, kind, "transposed")
    monkeypatch.setattr(type(chosen.backend), "paths_per_step", width)
    use_backend(engine, chosen)
    assert_all_alike(engine.score(PROMPT_IDS, texts, **settings), alone)


def test_the_prompt_is_fed_once_and_so_is_each_shared_beginning() -> None:
    engine = CocoaEngine(tiny_model("gpt2"), tiny_tokenizer())
    engine.info()
    fed: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda _, __, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    engine.score(PROMPT_IDS, [[5, 6, 7], [5, 6, 8, 9], [4], [5, 6, 7], [5]])
    assert fed == [len(PROMPT_IDS), len({(5,), (5, 6), (5, 6, 7), (5, 6, 8), (5, 6, 8, 9), (4,)})]


def test_forms_in_which_texts_may_come() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    expected = engine.score("the sea", [[5, 6], [7, 8]])
    for texts in (((5, 6), (7, 8)), torch.tensor([[5, 6], [7, 8]]), [torch.tensor([5, 6]), torch.tensor([7, 8])]):
        assert engine.score("the sea", texts) == expected  # type: ignore[call-overload]
    assert isinstance(engine.score("the sea", torch.tensor([5, 6])), Generation)  # type: ignore[call-overload]
    (one,) = engine.score("the sea", [" is"])
    assert_alike(one, engine.score("the sea", " is"))
    assert engine.score("the sea", ("is", "a"))[1].text == "a"


@pytest.mark.slow
def test_many_steps_hold_no_more_than_one_and_the_cache_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are used again: the cache is as large as the largest step needs. It is freed after an error, too."""
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    engine.info()
    opened: list[tuple[int, Any]] = []  # the tokens that memory is reserved for, and a reference to the store
    original = SharedCache.open

    def record(self: SharedCache, prompts: Any, reserve_tokens: int, capture: Any) -> Any:
        trees = original(self, prompts, reserve_tokens, capture)
        opened.extend((reserve_tokens, weakref.ref(tree.store)) for tree in trees)
        return trees

    monkeypatch.setattr(SharedCache, "open", record)
    monkeypatch.setattr(SharedCache, "paths_per_step", 16)
    engine.score(PROMPT_IDS, [[a, b] for a in range(3, 40) for b in range(3, 6)])
    assert [reserved for reserved, _ in opened] == [16]
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="at index 0, 1 are NaN"):
        engine.score(PROMPT_IDS, [[8, 9], [10]])
    gc.collect()
    assert len(opened) > 1
    assert not any(store() for _, store in opened)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dola", "decore", "diver"])
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_methods_that_read_more_read_the_prompt_once(architecture: str, method: str, tmp_path: Path) -> None:
    if (architecture, method) == ("mamba", "decore"):
        pytest.skip("it has no attention heads to mask")
    model = tiny_model(architecture)
    config = config_of(method, model, tmp_path, **({"dola_layers": "0,1"} if method == "dola" else {}))
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    texts = random_texts(6)
    for prompt in (PROMPT_IDS[:9], [7]):
        alone = [engine.score(prompt, text, config=config) for text in texts]
        passes = record(engine) if architecture != "mamba" else []
        together = engine.score(prompt, texts, config=config)
        assert_all_alike(together, alone)
        if passes:  # twice the prompt and the texts; one of a single token needs no pass before it to be contrasted
            contrasted_alone = method != "diver" and len(prompt) == 1
            assert len(passes) == (3 if contrasted_alone else 4)
            assert {one.usage.forward_passes for one in together} == {len(passes)}
