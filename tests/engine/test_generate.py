"""The engine's public contract on the real model, the consistency of sampled answers, and answers that stop early."""

import math
import threading
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Consistency, Generation, Runtime, Span, Timeline
from cocoa_engine.consistency import compare
from cocoa_engine.errors import PromptError
from cocoa_engine.execution import session
from cocoa_engine.text_matching import content_words, support, token_f1
from tests.helpers.alike import assert_alike, near
from tests.helpers.family_gguf import write_tiny_gguf
from tests.helpers.in_threads import Asks, join, start, wait_until
from tests.helpers.inside import Pass, hook_count, record
from tests.helpers.made_up_answers import generation
from tests.helpers.made_up_risk import fitted
from tests.helpers.prompts import PROMPTS, chat
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import endless, engine_for_schemas, engine_of, prompt, tiny_model, tiny_tokenizer

QUESTION = "Question: Who wrote the novel Moby Dick?\nAnswer:"
MESSAGES = [{"role": "user", "content": "Name two colours."}]


@pytest.fixture(scope="module")
def answer(engine: CocoaEngine) -> Generation:
    return engine.generate(QUESTION, max_new_tokens=24)


def test_a_call_reads_the_state_of_the_model_once(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It visits every weight, which takes as long as decoding a token. The calibrator and the task share it."""
    read: list[object] = []
    state_of = session.state_of
    monkeypatch.setattr(session, "state_of", lambda model: read.append(model) or state_of(model))
    assert engine.generate(QUESTION, max_new_tokens=1).risk_source == "calibrator"
    assert len(read) == 1


def test_the_figures_of_an_answer_agree_with_each_other(answer: Generation) -> None:
    assert "".join(span.text for span in answer.spans) == answer.text
    assert [token for span in answer.spans for token in span.token_ids] == answer.token_ids
    assert {span.kind for span in answer.spans} <= {"greedy", "risk_point"}
    assert answer.threshold is not None
    for span in answer.spans:
        assert answer.text[span.start : span.end] == span.text
        assert span.log_prob == pytest.approx(sum(span.token_log_probs))
        assert span.self_information == -span.log_prob
        assert span.score == pytest.approx(span.log_prob * (1 + answer.config.alpha * span.f_mlds))
        assert span.penalty == pytest.approx(span.log_prob - span.score)
        assert span.calibrated
        assert span.risk_source == "calibrator"
        assert span.risk is not None
        assert 0 <= span.risk <= 1
        assert span.flagged == (span.risk >= answer.threshold)
    assert Generation.model_validate_json(answer.model_dump_json()) == answer


def test_usage_counts(engine: CocoaEngine) -> None:
    plain = CocoaEngine(engine.model, engine.tokenizer, runtime=Runtime(draft_tokens=0))
    answer = plain.generate(QUESTION, max_new_tokens=24)
    usage = answer.usage
    assert usage.prompt_tokens == len(engine.encode(QUESTION))
    assert usage.completion_tokens == len(answer.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.risk_points == sum(span.kind == "risk_point" for span in answer.spans)
    # one pass for the prompt, and with boundary "right" one for each kept token
    assert usage.forward_passes >= 1 + usage.completion_tokens
    competing = sum(len(c.token_ids) for span in answer.spans for c in span.candidates)
    assert usage.fed_tokens == competing + sum(len(span.token_ids) for span in answer.spans if span.kind == "greedy")


def test_a_stream_is_live_and_gives_the_same_spans(engine: CocoaEngine, answer: Generation) -> None:
    with engine.stream(QUESTION, max_new_tokens=24) as stream:
        assert stream.generation is None
        assert list(stream) == answer.spans
    assert stream.generation == answer
    calls: list[int] = []
    handle = engine.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        stream = engine.stream(QUESTION, max_new_tokens=24)
        assert not calls  # nothing is done before the first span is asked for
        next(stream)
        after_first = len(calls)
        stream.close()
        assert list(stream) == []
    finally:
        handle.remove()
    assert 0 < len(calls) == after_first < 24


def test_prompts_as_token_ids_finish_reasons_and_chats(engine: CocoaEngine) -> None:
    by_text = engine.generate(QUESTION, max_new_tokens=4)
    assert by_text.finish_reason == "length"
    ids = engine.encode(QUESTION)
    for each in (ids, torch.tensor(ids)):
        assert engine.generate(each, max_new_tokens=4) == by_text
    eos = engine.chat([{"role": "user", "content": "Say only the word: yes"}], max_new_tokens=48)
    assert eos.finish_reason == "eos"
    assert eos.token_ids[-1] == engine.tokenizer.eos_token_id
    assert "<|im_end|>" not in eos.text
    text, timeline = engine.render_chat(MESSAGES), Timeline()
    assert text.endswith("<|im_start|>assistant\n")
    assert "Name two colours." in text
    chat = engine.chat(MESSAGES, max_new_tokens=8, timeline=timeline)
    assert in_order(timeline)
    assert chat == engine.generate(engine.encode(text, add_special_tokens=False), max_new_tokens=8)
    assert list(engine.stream_chat(MESSAGES, max_new_tokens=8)) == chat.spans


def test_a_stream_may_be_finished_by_another_thread_and_in_another_mode(engine: CocoaEngine) -> None:
    stream, other = (engine.stream(QUESTION, max_new_tokens=10) for _ in range(2))
    next(stream)
    join([start(lambda: list(stream))])
    with torch.inference_mode():
        next(other)
    list(other)
    assert stream.generation == other.generation == engine.generate(QUESTION, max_new_tokens=10)


MODES = {
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "default device": partial(torch.device, "meta"),  # as set_default_device("cuda") on a model elsewhere
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES.values(), ids=[*MODES])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba", "gguf"])
def test_the_caller_s_modes_of_torch_change_nothing(kind: str, mode: Any, tmp_path: Path) -> None:
    """Neither what is decoded nor how: a pass also runs for callers that are in no mode."""
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    models = [None if kind == "gguf" else tiny_model(kind) for _ in range(2)]

    def load() -> CocoaEngine:
        model = models.pop()
        return CocoaEngine.from_pretrained(str(file)) if model is None else engine_of(model)

    def results(engine: CocoaEngine) -> list[Any]:
        constraint = engine.constrain(regex="[a-z]+")
        return [
            engine.info().backend,
            engine.generate("hello the", max_new_tokens=8),
            engine.generate("hello the", temperature=1, seed=0, max_new_tokens=8),
            engine.generate("hello", method="greedy", temperature=1, seed=0, max_new_tokens=4),
            engine.generate("hello", logits_processor=constraint, max_new_tokens=4).token_ids,
            engine.generate("hello", stopping_criteria=lambda ids, _: ids.sum() > 10**9, max_new_tokens=4).token_ids,
            engine.score("hello", ["is the", "is a"]),
        ]

    used = load()
    expected = results(used)
    with mode():
        assert results(load()) == results(used) == expected


def test_the_model_is_left_as_it_was(engine: CocoaEngine) -> None:
    model = engine.model

    def state() -> list[Any]:
        return [hook_count(model), model.training, model.config.to_dict(), model.generation_config.to_dict()]

    before = state()
    list(engine.stream(QUESTION, max_new_tokens=6))
    abandoned = engine.stream(QUESTION, max_new_tokens=6)
    next(abandoned)
    assert hook_count(model) == before[0]
    del abandoned
    with pytest.raises(LookupError, match="from a user's processor"):
        engine.generate(QUESTION, logits_processor=Asks(Mock(side_effect=LookupError("from a user's processor"))))
    assert state() == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_in_training_mode_is_decoded_without_dropout() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    tiny = CocoaEngine(model, tiny_tokenizer())
    expected = tiny.generate("abc", max_new_tokens=12)
    model.transformer.drop.train()  # a part only
    assert tiny.generate("abc", max_new_tokens=12) == expected
    assert model.transformer.drop.training
    model.train()
    model.transformer.h[2].eval()  # a frozen part, as users have it
    flags = [module.training for module in model.modules()]
    assert tiny.generate("abc", max_new_tokens=12) == expected
    assert [module.training for module in model.modules()] == flags
    model = tiny_model("llama", attention_dropout=0.5)  # a pass works on its weights alone
    tiny = CocoaEngine(model, tiny_tokenizer())
    assert tiny.info().forward == "lean"
    expected = tiny.generate("abc", max_new_tokens=12)
    model.train()
    assert tiny.generate("abc", max_new_tokens=12) == expected
    assert all(module.training for module in model.modules())


def test_the_tokenizer_is_left_as_it_was() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    before = (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding)
    out = CocoaEngine(tiny_model("llama"), tokenizer).generate("hello world", max_new_tokens=3)
    assert out.usage.prompt_tokens > 7
    assert (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding) == before


def test_the_models_own_forward_is_not_captured(engine: CocoaEngine) -> None:
    """A user's forward pass in another thread, while ours runs, leaves our figures alone."""
    expected = engine.generate(QUESTION, max_new_tokens=8)
    stop = threading.Event()

    def run() -> None:
        ids = torch.tensor([engine.encode("something else entirely")])
        with torch.no_grad():
            while not stop.is_set():
                engine.model(ids)

    thread = start(run)
    try:
        assert engine.generate(QUESTION, max_new_tokens=8) == expected
    finally:
        stop.set()
        join([thread])


def in_order(timeline: Timeline) -> bool:
    times = [timeline.created, timeline.started, timeline.prompt_read, timeline.ended]
    return None not in times and times == sorted(times)  # type: ignore[type-var]


@pytest.mark.parametrize("method", ["cocoa-sig", "dola"])
def test_timelines_of_a_whole_answer_and_of_a_stream(method: Any) -> None:
    tiny, whole, streamed = engine_of(tiny_model("llama")), Timeline(), Timeline()
    assert (whole.queue_seconds, whole.prefill_seconds, whole.decode_seconds) == (None, None, None)
    config = CocoaConfig(max_new_tokens=6, method=method, dola_layers="1,2")
    answer = tiny.generate(prompt(1), config=config, timeline=whole)
    with tiny.stream(prompt(1), config=config, timeline=streamed) as stream:
        assert streamed.started is None
        spans = list(stream)
    assert spans == answer.spans
    assert in_order(whole)
    assert in_order(streamed)
    assert sum(each or 0 for each in (whole.queue_seconds, whole.prefill_seconds, whole.decode_seconds)) == (
        pytest.approx((whole.ended or 0) - whole.created)
    )


def test_a_waiting_call_has_not_started() -> None:
    tiny, timeline = engine_of(tiny_model("llama"), max_batch_size=1), Timeline()
    scheduler = tiny.session.scheduler
    with scheduler.slot():
        call = start(lambda: tiny.generate(prompt(2), max_new_tokens=2, timeline=timeline))
        wait_until(lambda: bool(scheduler.waiting))
        assert timeline.started is None
    join([call])
    assert in_order(timeline)


SHORT: dict[str, Any] = {"max_new_tokens": 6, "seed": 5}


def test_samples_are_those_of_their_seeds_and_share_their_passes(tiny: CocoaEngine) -> None:
    passes = record(tiny)
    found = tiny.consistency(prompt(1), "any text", 4, temperature=1.3, top_p=0.9, **SHORT)
    assert max(len(each.widths) for each in passes) == 4
    for number, sample in enumerate(found.samples):
        config = CocoaConfig(method="sample", temperature=1.3, top_p=0.9, max_new_tokens=6, seed=5 + number)
        assert_alike(sample, tiny.generate(prompt(1), config=config))
    assert len({sample.text for sample in found.samples}) > 1
    assert found.answer == "any text"
    assert found.generation is None


def test_the_answer_is_generated_with_the_settings_if_none_is_given(tiny: CocoaEngine) -> None:
    found = tiny.consistency(prompt(1), n=2, method="cocoa", max_risk=None, **SHORT)
    expected = tiny.generate(prompt(1), method="cocoa", **SHORT)
    assert found.generation is not None
    assert_alike(found.generation, expected)
    assert found.answer == expected.text
    again = tiny.consistency(prompt(1), expected, 2, **SHORT)
    assert (again.generation, again.agreement) == (expected, found.agreement)
    assert Consistency.model_validate_json(found.model_dump_json()) == found


def test_samples_that_are_nearly_greedy_agree(tiny: CocoaEngine) -> None:
    for answer, agreement in ((None, 1.0), ("nothing of that", 0.0)):
        found = tiny.consistency(prompt(1), answer, 3, temperature=1e-6, method="greedy", **SHORT)
        assert (found.agreement, found.f1, found.matches) == (agreement, agreement, [agreement] * 3)


def test_a_comparison_of_the_user(tiny: CocoaEngine) -> None:
    texts: list[tuple[str, str]] = []

    def half(sample: str, answer: str) -> float:
        texts.append((sample, answer))
        return len(texts) / 4

    found = tiny.consistency(prompt(1), "answer", 2, match=half, **SHORT)
    assert found.matches == [0.25, 0.5]
    assert found.agreement == 0.375
    assert texts == [(sample.text, "answer") for sample in found.samples]
    for wrong in (1.5, -1, "yes", None, math.nan):
        with pytest.raises(ConfigError, match=r"match must return a bool or a number in \[0, 1\]"):
            tiny.consistency(prompt(1), "answer", 1, match=lambda *_: wrong, **SHORT)  # noqa: B023


def test_messages_are_a_prompt_and_processors_apply_to_the_answer_and_the_samples() -> None:
    engine, messages = engine_for_schemas(), [{"role": "user", "content": "Hello"}]
    found = engine.consistency(messages, n=2, **SHORT)
    assert found == engine.consistency(engine.encode_chat(messages), n=2, **SHORT)
    grammar = engine.constrain(regex="yes|no")
    found = engine.consistency(prompt(1), n=4, temperature=5.0, logits_processor=grammar, **SHORT)
    assert {found.answer, *(sample.text for sample in found.samples)} == {"yes", "no"}
    assert found.agreement == sum(sample.text == found.answer for sample in found.samples) / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"n": count}, "n must be a whole number from 1 to 10000") for count in (0, 10_001, 10**5000, True, 2.5)),
        ({"temperature": 0}, "all samples are alike"),
        ({"top_k": 1}, "all samples are alike"),
        ({"temperature": -1}, "temperature"),
        ({"gama": 1}, "unknown setting 'gama'"),
    ],
)
def test_refused_before_any_work(options: dict[str, Any], message: str, tiny: CocoaEngine) -> None:
    passes = record(tiny)
    with pytest.raises(ConfigError, match=message):
        tiny.consistency(prompt(1), **options)
    with pytest.raises(PromptError):
        tiny.consistency("")
    assert not passes


F1 = {
    ("The Eiffel Tower.", "eiffel tower"): 1.0,
    ("in 1889", "It was built in 1889"): 2 * 2 / (2 + 5),
    ("Paris Paris", "Paris"): 2 / 3,
    ("Rome", "Paris"): 0.0,
    ("", "the"): 1.0,
    ("", "Rome"): 0.0,
}


def test_f1_of_words_and_support_by_the_share_of_samples_that_contain_them() -> None:
    for (one, other), f1 in F1.items():
        assert token_f1(one, other) == token_f1(other, one) == pytest.approx(f1)
    assert content_words("In 1889 the Eiffel Tower was new to us, the tower!") == ["in", "1889", "eiffel", "tower"]
    samples = ["The tower of 1889.", "Eiffel built a tower", "Who knows?"]
    assert support("the Tower", samples) == 2 / 3
    assert support("Eiffel, 1889", samples) == 1 / 3
    assert support("it is so", samples) is None
    found = compare("The Tower.", [generation((text, 0.5)) for text in samples[:2]])
    assert found.support("Eiffel tower") == 0.75


def test_the_claims_that_the_samples_do_not_support() -> None:
    answer = generation(("Frank Herbert", 0.4), (" wrote it in ", 0.1), ("1950", 0.6), (".", 0.9))
    samples = [generation((text, 0.1)) for text in ("Frank Herbert, in 1965.", "Herbert wrote Dune in 1965.", "1950?")]
    found = compare(answer, samples)
    checks = {check.text: check.reasons for check in found.check_these()}
    assert list(checks) == [check.text for check in answer.check_these()]
    disagreed = {text for text, reasons in checks.items() if "samples disagree" in reasons}
    assert disagreed == {text for text in checks if (found.support(text) or 0) < 0.5} != set()
    assert "1950" in disagreed
    assert "Frank Herbert" not in disagreed
    assert len(found.check_these(1)) == 1
    with pytest.raises(ConfigError, match="given as a text"):
        compare("Frank Herbert", samples).check_these()


RING = "the ring is a thing"
METHODS = ("greedy", "cocoa", "cocoa-sig", "diver", "dola", "decore", "sample")


def first_at(spans: list[Span], limit: float) -> int:
    return next(number for number, span in enumerate(spans) if span.risk >= limit)


def limit_of(full: Generation) -> float:
    """A limit that is passed neither by the first span nor only by the last."""
    highest = list(accumulate((span.risk for span in full.spans), max))
    rises = [n for n in range(1, len(highest) - 1) if highest[n] > highest[n - 1] + 1e-3]
    assert rises, highest
    n = rises[len(rises) // 2]
    return (highest[n - 1] + highest[n]) / 2


def assert_stopped_as(stopped: Generation, full: Generation, limit: float) -> None:
    """The spans of the whole answer up to the first that reaches the limit, which alone is marked."""
    end = first_at(full.spans, limit)
    assert stopped.finish_reason == "risk"
    assert [span.reaches_max_risk for span in stopped.spans] == [False] * end + [True]
    for span, whole in zip(stopped.spans, full.spans[: end + 1], strict=True):
        assert (span.token_ids, span.kind, span.start) == (whole.token_ids, whole.kind, whole.start)
    assert [span.text for span in stopped.spans[:-1]] == [span.text for span in full.spans[:end]]
    assert stopped.spans[-1].text.startswith(full.spans[end].text)  # then bytes that now never make a character
    assert [span.risk for span in stopped.spans] == near([s.risk for s in full.spans[: end + 1]])
    assert Generation.model_validate_json(stopped.model_dump_json()) == stopped


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_pass_is_run_after_the_span(method: str, tmp_path: Path) -> None:
    engine = endless()
    settings = {"max_new_tokens": 24, "max_span_tokens": 4, "final_layer": "pre_norm"}
    config = config_of(method, engine.model, tmp_path, **settings)
    engine.generate(RING, config=config)  # whatever is tried out first
    passes: list[Pass] = record(engine)
    with engine.stream(RING, config=config) as stream:
        after = [len(passes) for _ in stream]  # the passes run when each span was decided
    full = stream.generation
    assert full is not None
    limit = limit_of(full)
    passes.clear()
    stopped = engine.generate(RING, config=config, max_risk=limit)
    assert_stopped_as(stopped, full, limit)
    assert len(passes) == after[first_at(full.spans, limit)] < after[-1]
    assert stopped.usage.forward_passes < full.usage.forward_passes


def test_rows_of_a_batch_stop_by_themselves(tmp_path: Path) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=6), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    prompts = [RING, "a thing", "the ing", "is er"]
    settings: dict[str, Any] = {"max_new_tokens": 16, "max_span_tokens": 4, "final_layer": "pre_norm"}
    full = engine.generate_batch(prompts, **settings)
    limit = median(generation.max_risk for generation in full)
    passes = record(engine)
    answers = engine.generate_batch(prompts, max_risk=limit, **settings)
    assert {"risk"} < {answer.finish_reason for answer in answers}  # not all of them stop
    for answer, whole in zip(answers, full, strict=True):
        if whole.max_risk >= limit:
            assert_stopped_as(answer, whole, limit)
        else:
            assert_alike(answer.model_copy(update={"config": whole.config}), whole)
    assert len(passes[-1].widths) < len(passes[len(prompts)].widths)  # those that stopped have left


@pytest.mark.filterwarnings("ignore")
def test_calibrated_risk_is_what_counts(engine: CocoaEngine) -> None:
    judged = CocoaEngine(engine.model, engine.tokenizer, calibrator=fitted(model_name=engine.model_name))
    full = judged.generate(chat(PROMPTS["question"]), max_new_tokens=24)
    limit = sum(sorted(span.risk for span in full.spans)[-2:]) / 2
    raw = engine.generate(chat(PROMPTS["question"]), max_new_tokens=24, risk="f_mlds")
    assert limit < raw.spans[0].risk
    assert_stopped_as(judged.generate(chat(PROMPTS["question"]), max_new_tokens=24, max_risk=limit), full, limit)


def test_the_last_span_counts_too_and_a_low_risk_changes_nothing(engine: CocoaEngine) -> None:
    """``finish_reason`` alone tells whether a span reached the limit, even if a stop text ends the answer there."""
    settings: dict[str, Any] = {"max_new_tokens": 20, "stop": "."}
    full = engine.generate(PROMPTS["story"], **settings)
    for limit, reason in ((0.0, "risk"), (full.max_risk + 1e-3, full.finish_reason)):
        answer = engine.generate(PROMPTS["story"], max_risk=limit, **settings)
        assert answer.finish_reason == reason
        assert any(span.reaches_max_risk for span in answer.spans) == (reason == "risk")
    one = engine.generate(PROMPTS["story"], max_risk=0.0, gamma=1, **settings)  # a single span, to the end
    whole = engine.generate(PROMPTS["story"], gamma=1, **settings)
    assert (whole.finish_reason, one.finish_reason) == ("stop" if "." not in whole.text else "length", "risk")
    assert [span.model_copy(update={"reaches_max_risk": False}) for span in one.spans] == whole.spans
    assert (one.text, one.usage) == (whole.text, whole.usage)


def test_the_text_before_a_stop_text_is_the_same(engine: CocoaEngine) -> None:
    """Held back while a stop text may begin there, it is given out when the answer stops."""
    prompt, settings = chat(PROMPTS["question"]), {"max_new_tokens": 24}
    full = engine.generate(prompt, **settings)
    stopped = engine.generate(prompt, max_risk=0.0, **settings)
    half = full.spans[0].text + "never there"
    with engine.stream(prompt, max_risk=0.0, stop=half, **settings) as stream:
        (span,) = stream
    assert (span.text, span.reaches_max_risk) == (stopped.text, True)


def test_the_limit_of_the_setting_and_of_a_scored_text() -> None:
    """A risk that reaches the limit counts, as for a calibrator's own threshold, and for every gate."""
    for value, match in ((-0.1, "max_risk"), (2.5, "max_risk"), (float("nan"), "max_risk"), (1.2, "risk='f_mlds'")):
        with pytest.raises(ConfigError, match=match):
            CocoaConfig(max_risk=value)
    assert CocoaConfig(max_risk=1.2, risk="f_mlds").max_risk == 1.2
    engine = CocoaEngine(tiny_model("llama", seed=6), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    (span,) = engine.score(RING, "a thing").spans
    assert not span.reaches_max_risk
    for limit, reached in ((span.risk, True), (math.nextafter(span.risk, 2), False)):
        (again,) = engine.score(RING, "a thing", max_risk=limit).spans
        assert again.reaches_max_risk == reached
