"""Completions over HTTP are the engine's answers, whole and streamed; echoed prompts have their log-probabilities."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from cocoa_engine import CocoaConfig
from cocoa_integrations.server import create_app
from tests.helpers import served
from tests.helpers.alike import near
from tests.helpers.served import ASKED, COMPLETIONS, Speaker, chat, gated, post, refusal, speaker

LIMIT = 24
TEXT = ASKED[COMPLETIONS]["prompt"]
completion = partial(chat, path=COMPLETIONS)
LISTS = ("tokens", "token_logprobs", "top_logprobs")
chunks = partial(served.chunks, path=COMPLETIONS)
WITHOUT_EFFECT = {"best_of": 1, "suffix": "", "presence_penalty": 0, "logit_bias": {}, "user": "me", "unheard_of": [1]}


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker(ends=False)


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
async def test_an_answer_is_the_engines(tiny: Speaker, path: str) -> None:
    expected = tiny.generate(TEXT, config=CocoaConfig(max_new_tokens=LIMIT))
    answer = (await post(create_app(tiny), {"prompt": TEXT, "max_tokens": LIMIT, **WITHOUT_EFFECT}, path)).json()
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"], choice["logprobs"]) == (0, expected.text, None)
    assert choice["finish_reason"] == "length"
    assert len(expected.spans) > 3
    report = choice["cocoa_risk"]
    assert [span["risk"] for span in report["spans"]] == near([one.risk for one in expected.spans])
    assert report["finish_reason"] == expected.finish_reason
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


@pytest.mark.slow
async def test_many_prompts_and_answers(tiny: Speaker) -> None:
    prompts = ["One", "Two or three"]
    body = {"n": 2, "seed": 3, "cocoa": {"method": "sample"}, "temperature": 2.0}
    many = await completion(tiny, prompt=prompts, **body)
    alone = [await completion(tiny, prompt=one, **body) for one in prompts]
    expected = [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["text"] for choice in many["choices"]] == expected
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert len(set(expected)) > 2
    assert many["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    by_ids = await completion(tiny, prompt=[tiny.encode(one) for one in prompts], **body)
    assert [choice["text"] for choice in by_ids["choices"]] == expected
    texts = [""] * 4
    for event in await chunks(tiny, prompt=prompts, echo=True, **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    echoed = await completion(tiny, prompt=prompts, echo=True, **body)
    assert texts == [choice["text"] for choice in echoed["choices"]]
    assert texts == [prompts[number // 2] + text for number, text in enumerate(expected)]


async def test_more_prompts_than_are_decoded_or_queued_are_named() -> None:
    error = await refusal(speaker(max_batch_size=1, max_queue=0), path=COMPLETIONS, prompt=["a", "b"])
    assert error["param"] == "prompt"
    assert "2 answers is above the server's limit of 1" in error["message"]


async def test_a_stream_is_the_answer_span_by_span(tiny: Speaker) -> None:
    expected = tiny.generate(TEXT, config=CocoaConfig(max_new_tokens=LIMIT))
    *spans, last, usage = await chunks(tiny, stream_options={"include_usage": True})
    choices = [event["choices"][0] for event in spans]
    assert [one["text"] for one in choices] == [span.text for span in expected.spans]
    assert [one["cocoa_spans"][0]["index"] for one in choices] == list(range(len(expected.spans)))
    assert all(one["finish_reason"] is None for one in choices)
    whole = (await completion(tiny))["choices"][0]
    assert last["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert last["choices"][0]["cocoa_risk"].keys() == whole["cocoa_risk"].keys()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(expected.token_ids))
    assert {event["object"] for event in spans} == {"text_completion"}


async def test_logprobs_cover_the_text_and_list_an_end_token_by_its_name(tiny: Speaker) -> None:
    """The evaluation harness counts on one entry for each decoded token."""
    text, ending = (await completion(tiny))["choices"][0]["text"], speaker("Yes.")
    special, eos = set(ending.tokenizer.all_special_tokens), ending.tokenizer.eos_token
    for engine, body, expected in (
        (tiny, {"logprobs": 3}, text),
        (tiny, {"logprobs": 0, "stop": text[4:6]}, text[: text.index(text[4:6])]),
        (ending, {"logprobs": 0}, "Yes."),
    ):
        answer = await completion(engine, **body)
        [choice] = answer["choices"]
        listed = choice["logprobs"]
        counts = {len(listed[key]) for key in (*LISTS, "text_offset")}
        assert len(counts) == 1
        assert (choice["text"], choice["finish_reason"]) == (expected, "length" if expected == text else "stop")
        assert "".join(token for token in listed["tokens"] if token not in special) == expected
        for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
            assert token in special or expected[offset : offset + len(token)] == token
        assert listed["cocoa_risk"] == choice["cocoa_risk"]
        if body == {"logprobs": 3}:
            for token, log_prob, top in zip(*(listed[key] for key in LISTS), strict=True):
                assert top[token] >= log_prob
                assert 1 <= len(top) <= 4
    assert (counts, listed["tokens"][-1]) == ({answer["usage"]["completion_tokens"]}, eos)


async def test_streamed_logprobs_are_those_of_the_whole_answer(tiny: Speaker) -> None:
    [whole] = (await completion(tiny, logprobs=2, echo=True))["choices"]
    events = await chunks(tiny, logprobs=2, echo=True)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    for key in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for listed in streamed for value in listed[key]]
        if key == "token_logprobs":
            assert joined[0] is None
            assert joined[1:] == near(whole["logprobs"][key][1:])
        else:
            assert joined == whole["logprobs"][key]


@pytest.mark.parametrize("given_ids", [False, True])
async def test_an_echoed_prompt_has_log_probabilities(tiny: Speaker, given_ids: bool) -> None:
    ids = [*tiny.encode(TEXT), 2, 40]  # 2 is a special token
    prompt: Any = ids if given_ids else TEXT
    ids = ids if given_ids else tiny.encode(TEXT)
    answer = await completion(tiny, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    [choice] = answer["choices"]
    listed = choice["logprobs"]
    assert len(listed["tokens"]) == len(ids) + 1  # one was decoded, which may be an end token
    expected = tiny.score(ids[:1], ids[1:], method="greedy", top_logprobs=1).spans[0]
    assert listed["token_logprobs"][0] is None
    assert listed["top_logprobs"][0] is None
    assert listed["token_logprobs"][1 : len(ids)] == near(expected.token_log_probs)
    assert expected.top_log_probs is not None
    for place, ((_, best),) in enumerate(expected.top_log_probs, 1):
        assert max(listed["top_logprobs"][place].values()) == near(best)
    assert choice["text"].startswith(tiny.decode(ids))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 1)


async def test_a_greedy_continuation_is_seen_as_greedy(tiny: Speaker) -> None:
    """What the evaluation harness does: the log-probability of each token equals the highest one."""
    prompt = tiny.encode("Ab")
    text = tiny.generate(prompt, method="greedy", max_new_tokens=5).token_ids
    [choice] = (await completion(tiny, prompt=[*prompt, *text], echo=True, logprobs=1, max_tokens=1))["choices"]
    own, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert [log_prob == max(top.values()) for log_prob, top in zip(own, best, strict=True) if top][
        len(prompt) - 1 : -1
    ] == [True] * len(text)


async def test_an_echo_alone(tiny: Speaker) -> None:
    [one] = (await completion(tiny, prompt=[40], echo=True, logprobs=1, max_tokens=0))["choices"]
    assert one["logprobs"]["token_logprobs"] == [None]
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "stream": True}):
        with gated(tiny) as gate:
            gate.open()
            before = gate.reached
            if "stream" in body:
                [event] = await chunks(tiny, echo=True, logprobs=0, **body)
                [choice] = event["choices"]
            else:
                answer = await completion(tiny, echo=True, logprobs=0, **body)
                [choice] = answer["choices"]
                assert answer["usage"]["completion_tokens"] == 0
            assert gate.reached == before  # nothing was decoded
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert len(choice["logprobs"]["tokens"]) == len(tiny.encode(TEXT))
        assert "cocoa_risk" not in choice


@pytest.mark.parametrize(
    ("report", "in_choice", "in_logprobs"),
    [("both", True, True), ("message", True, False), ("logprobs", False, True), ("none", False, False)],
)
async def test_where_the_risk_is(tiny: Speaker, report: str, in_choice: bool, in_logprobs: bool) -> None:
    [choice] = (await completion(tiny, logprobs=0, cocoa={"report": report}))["choices"]
    assert ("cocoa_risk" in choice, "cocoa_risk" in choice["logprobs"]) == (in_choice, in_logprobs)
    events = await chunks(tiny, logprobs=0, cocoa={"report": report})
    first, last = events[0]["choices"][0], events[-1]["choices"][0]
    assert ("cocoa_spans" in first, "cocoa_spans" in first["logprobs"]) == (in_choice, in_logprobs)
    assert ("cocoa_risk" in last, "cocoa_risk" in last["logprobs"]) == (in_choice, in_logprobs)


async def test_logit_bias_applies(tiny: Speaker) -> None:
    body = {"logit_bias": {str(tiny.encode("Q")[0]): 100}, "max_tokens": 3}
    assert (await completion(tiny, **body))["choices"][0]["text"] == "QQQ"
    assert "".join(event["choices"][0]["text"] for event in await chunks(tiny, **body)) == "QQQ"
