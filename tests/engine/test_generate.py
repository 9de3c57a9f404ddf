"""The engine's public contract, on the real model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime, Timeline
from cocoa_engine.execution import session
from tests.helpers.engines import engine_of, prompt
from tests.helpers.hooks import hook_count
from tests.helpers.in_threads import join, start, wait_until
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

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


def test_settings_override_single_fields(engine: CocoaEngine) -> None:
    config = CocoaConfig(method="cocoa", metric="con_mlds", max_new_tokens=4)
    out = engine.generate(QUESTION, config=config, alpha=1.0)
    assert out.config == config.replace(alpha=1.0)
    assert all(span.calibrated for span in out.spans)  # which does not depend on these settings
    assert all(span.score == pytest.approx(span.log_prob - span.con_mlds) for span in out.spans)


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


def test_score_of_text(engine: CocoaEngine) -> None:
    good, bad = (engine.score("The capital of France is", text) for text in (" Paris.", " banana."))
    assert good.text == " Paris."
    assert good.spans[0].log_prob > bad.spans[0].log_prob
    mean = engine.score("The capital of France is", " Paris.", span_log_prob="mean").spans[0]
    assert mean.log_prob == pytest.approx(good.spans[0].log_prob / 2)
    assert mean.score == pytest.approx(mean.log_prob * (1 + 2.5 * mean.f_mlds))
    whole = engine.encode("The capital of France is Paris.")
    assert whole[-len(good.token_ids) :] == good.token_ids


def test_a_stream_may_be_finished_by_another_thread_and_in_another_mode(engine: CocoaEngine) -> None:
    stream, other = (engine.stream(QUESTION, max_new_tokens=10) for _ in range(2))
    next(stream)
    join([start(lambda: list(stream))])
    with torch.inference_mode():
        next(other)
    list(other)
    assert stream.generation == other.generation == engine.generate(QUESTION, max_new_tokens=10)


def test_the_model_is_left_as_it_was(engine: CocoaEngine) -> None:
    model = engine.model
    before = (hook_count(model), model.training, model.config.to_dict(), model.generation_config.to_dict())
    list(engine.stream(QUESTION, max_new_tokens=6))
    abandoned = engine.stream(QUESTION, max_new_tokens=6)
    next(abandoned)
    during = hook_count(model)
    del abandoned

    def explode(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("from a user's processor")

    with pytest.raises(RuntimeError, match="from a user's processor"):
        engine.generate(QUESTION, logits_processor=explode)
    after = (hook_count(model), model.training, model.config.to_dict(), model.generation_config.to_dict())
    assert during == before[0]
    assert after == before
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


# --- timelines


def in_order(timeline: Timeline) -> bool:
    times = [timeline.created, timeline.started, timeline.prompt_read, timeline.ended]
    known = [one for one in times if one is not None]
    return len(known) == 4 and known == sorted(known)


@pytest.mark.parametrize("method", ["cocoa-sig", "dola"])
def test_of_a_whole_answer_and_of_a_stream(method: Any) -> None:
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
