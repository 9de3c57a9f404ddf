"""What Prometheus reads: the load, tokens, times and risks of what the server has answered."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.alike import near
from tests.helpers.served import HELLO, Exchange, client_of, gated, happens, post, speaker

ASKED = {"messages": HELLO, "max_tokens": 12}
NAMES = {
    *("num_requests_running", "num_requests_waiting", "prefix_cache_queries", "prefix_cache_hits"),
    *("prompt_tokens", "generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("spans", "risk_points", "flagged_spans", "span_risk", "answer_max_risk"),
    *("scored_texts", "cancelled", "rejected"),
}


async def metrics(app: FastAPI, **headers: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """The value of each sample, by its name and the values of its labels beside the model's name."""
    async with client_of(app, **headers) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert {family.name for family in families} >= {f"cocoa:{name}" for name in NAMES}
    found = {}
    for family in families:
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            assert sample.labels["model_name"] == "tiny"
            found[sample.name.removeprefix("cocoa:"), labels] = sample.value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_counted(stream: bool) -> None:
    engine = speaker(ends=False)
    app = create_app(engine)
    long = [{"role": "user", "content": "Say something, and say it at length. " * 4}]  # short prompts are not cached
    expected = engine.chat(long, max_new_tokens=12)
    for _ in range(2):
        assert (await post(app, {**ASKED, "messages": long, "stream": stream})).status_code == 200
    found = await metrics(app)
    usage, spans = expected.usage, expected.spans
    assert found["prompt_tokens_total", ()] == 2 * usage.prompt_tokens
    assert found["generation_tokens_total", ()] == 2 * 12
    assert found["request_success_total", ("length",)] == 2
    assert found["prefix_cache_queries_total", ()] == 2 * usage.prompt_tokens
    assert 0 < found["prefix_cache_hits_total", ()] < 2 * usage.prompt_tokens
    assert found["request_prompt_tokens_sum", ()] == 2 * usage.prompt_tokens
    assert found["request_generation_tokens_sum", ()] == 24
    assert found["spans_total", ()] == found["span_risk_count", ("token_probability",)] == 2 * len(spans)
    assert found["span_risk_sum", ("token_probability",)] == near(2 * sum(one.risk or 0 for one in spans))
    assert found["answer_max_risk_sum", ("token_probability",)] == near(2 * expected.max_risk)
    assert found["risk_points_total", ()] == 2 * usage.risk_points
    assert found["flagged_spans_total", ()] == 2 * sum(one.flagged for one in spans)
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"{name}_seconds_count", ()] == 2
    assert found["inter_token_latency_seconds_count", ()] == 2
    phases = sum(found[f"request_{name}_time_seconds_sum", ()] for name in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(found["e2e_request_latency_seconds_sum", ()])
    assert found.get(("time_to_first_token_seconds_count", ()), 0) == (2 if stream else 0)
    assert found["num_requests_running", ()] == found["num_requests_waiting", ()] == 0


async def test_completions_and_scored_texts_are_counted() -> None:
    app = create_app(speaker(ends=False))
    await post(app, {"prompt": ["One", "Two"], "max_tokens": 3}, "/v1/completions")
    await post(app, {"prompt": "One", "texts": ["Two", "Three"]}, "/v1/cocoa/score")
    found = await metrics(app)
    assert found["generation_tokens_total", ()] == 6
    assert found["scored_texts_total", ()] == 2


async def test_load_refusals_and_clients_that_leave() -> None:
    engine = speaker(ends=False, max_batch_size=1, max_queue=1)
    app = create_app(engine)
    with gated(engine) as gate:
        running = Exchange(app, ASKED)
        await happens(lambda: gate.reached == 1)
        waiting = Exchange(app, ASKED)
        await happens(lambda: engine.session.scheduler.waiting == 1)
        assert (await post(app, ASKED)).status_code == 429
        found = await metrics(app)
        assert (found["num_requests_running", ()], found["num_requests_waiting", ()]) == (1, 1)
        assert found["rejected_total", ()] == 1
        waiting.leave()
        await waiting.ended()
        gate.open()
        await running.ended()
    found = await metrics(app)
    assert found["cancelled_total", ("client",)] == 1
    assert ("cancelled_total", ("shutdown",)) not in found
    assert found["request_success_total", ("length",)] == 1


async def test_apps_do_not_share_their_metrics_which_need_the_key() -> None:
    engine, settings = speaker(ends=False), ServerSettings(api_keys=("secret",), served_names=("tiny", "other"))
    first, second = create_app(engine), create_app(engine, settings)
    await post(first, ASKED)
    assert ("spans_total", ()) in await metrics(first)
    assert ("spans_total", ()) not in await metrics(second, authorization="Bearer secret")
    async with client_of(second) as client:
        assert (await client.get("/metrics")).status_code == 401
    async with client_of(first, accept="application/openmetrics-text; version=1.0.0") as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_a_risk_that_is_no_number_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speaker(ends=False)
    answer: Any = engine.chat(HELLO, max_new_tokens=4)
    broken = answer.model_copy(
        update={"spans": [answer.spans[0].model_copy(update={"risk": float("nan")}), *answer.spans[1:]]}
    )
    monkeypatch.setattr(engine, "generate", lambda *_, **options: broken)
    app = create_app(engine)
    assert (await post(app, ASKED)).status_code == 200
    found = await metrics(app)
    assert found["spans_total", ()] == len(answer.spans)
    assert found.get(("span_risk_count", ("token_probability",)), 0) == len(answer.spans) - 1
    assert ("answer_max_risk_count", ("token_probability",)) not in found
