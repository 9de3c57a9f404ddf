"""The GPU measurement on a tiny model on the CPU, and the client of the measurements under load."""

from __future__ import annotations

import json

import pytest
import torch
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from benchmarks import gpu
from benchmarks.serving.client import PATH, ask_all
from benchmarks.serving.first_text import before_first_text
from benchmarks.serving.load import percentile
from benchmarks.serving.memory import is_flat
from cocoa_integrations.server import create_app
from tests.helpers.live_server import served
from tests.helpers.served import HELLO, speaker


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("results") / "gpu.json"
    gpu.main(f"--tiny --device cpu --tokens 40 --prompt-tokens 8 --rounds 2 --out {out}".split())
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_decoder_is_timed(record: dict) -> None:
    assert list(record["decoders"])[:2] == [gpu.HUGGING_FACE, gpu.GREEDY]
    assert len(record["decoders"]) == 2 + len(gpu.RATES)
    for decoder in record["decoders"].values():
        times = decoder["ms_per_token"]
        assert 0 < times["lowest"] <= times["median"] <= times["highest"]
        assert len(decoder["rounds_ms"]) == 2
    assert record["decoders"][gpu.GREEDY]["ratio_to_greedy"]["median"] == 1
    assert list(record["step_ms"]) == [str(width) for width in gpu.WIDTHS]
    assert record["machine"]["torch"] == torch.__version__
    assert record["bandwidth_bound_ms"] == pytest.approx(record["bytes_read_per_step"] / 4.8e9)


@pytest.mark.parametrize("rate", gpu.RATES)
def test_the_script_is_followed(record: dict, rate: float) -> None:
    (decoding,) = [decoder["decoding"] for name, decoder in record["decoders"].items() if name.endswith(f" {rate}")]
    assert decoding["risk_points_per_token"] == rate
    # the prefill, then one pass for each token; the branches at the end grow on to their boundary
    assert 41 <= round(40 * decoding["forward_passes_per_token"]) <= 41 + 16
    assert decoding["candidates_per_risk_point"] == pytest.approx(2.8, abs=0.2)
    assert decoding["fed_per_token"] > 1 + rate / 2


def test_targets_do_not_apply_to_a_tiny_model(record: dict) -> None:
    assert len(record["targets"]) == 2 * len(gpu.RATES)
    assert all(target["met"] is None for target in record["targets"])
    decoders = {gpu.GREEDY: {}, "x": {"ms_per_token": {"median": 4.0}, "ratio_to_greedy": {"median": 1.2}}}
    assert [target["met"] for target in gpu.targets(decoders, applies=True)] == [True, False]


BODY = {"messages": HELLO, "max_tokens": 6, "stream_options": {"include_usage": True}}


async def test_answers_of_the_server() -> None:
    engine = speaker(ends=False)
    expected = engine.chat(HELLO, max_new_tokens=6)
    with served(create_app(engine)) as url:
        answers = await ask_all(url, [BODY, BODY, {**BODY, "max_tokens": -1}], at_once=2)
    good = [one for one in answers if one.number < 2]
    assert [(one.text, one.tokens, one.failure) for one in good] == [(expected.text, 6, None)] * 2
    assert all(one.to_first > 0 and len(one.between) == len(one.pieces) - 1 for one in good)
    [bad] = [one for one in answers if one.number == 2]
    assert bad.status == 400
    assert "max_tokens" in str(bad.failure)


async def test_a_refused_call_is_repeated_and_a_cut_stream_is_an_error() -> None:
    app, calls = FastAPI(), []

    @app.post(PATH)
    async def chat() -> Response:
        calls.append(None)
        if len(calls) == 1:
            return Response(status_code=429, headers={"retry-after": "0"})
        return StreamingResponse(iter([b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n']))

    with served(app) as url:
        [answer] = await ask_all(url, [BODY], at_once=1)
    assert (answer.refusals, answer.text, answer.failure) == (1, "half", "the stream has no end")
    [refused] = await ask_all(url, [BODY], at_once=1)
    assert "ClientConnector" in str(refused.failure)


def test_passes_before_the_first_text() -> None:
    """The span is the one that a stream begins with, and the pass over its last token was needed."""
    engine = speaker("Yes, it is.")
    with engine.stream_chat(HELLO, config=engine.config.replace(max_new_tokens=24)) as stream:
        span = next(stream)
    counted = before_first_text(engine, {"messages": HELLO, "max_tokens": 24}, engine.config.method)
    assert span.text
    assert counted["tokens"] == len(span.token_ids)
    assert 1 <= counted["passes"] <= counted["tokens"]
    assert engine.session.scheduler.observers == []


def test_percentiles_and_memory_that_is_flat_when_it_has_not_changed_for_some_steps() -> None:
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]

    def points(*values: float) -> list[dict[str, float]]:
        return [{"unique_mib": value} for value in values]

    assert not is_flat(points(100, 100, 100, 100))
    assert is_flat(points(50, 100, 101, 100, 102, 100))
    assert not is_flat(points(100, 100, 103, 100, 100))
