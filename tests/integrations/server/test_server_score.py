"""The risk of given texts, and what the server says of itself."""

import asyncio
import platform
import threading
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime, __version__
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.alike import near, risk_report
from tests.helpers.in_threads import happens
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import HELLO, PATIENCE, SCORE, client_of, post, refusal

PROMPT = "A tower is in Paris. Where is the tower?"
TEXTS = ["It is in Paris.", "It is in Rome, or so."]


async def score(engine: CocoaEngine, **body: Any) -> dict[str, Any]:
    response = await post(create_app(engine), body, SCORE)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert (
        response.headers["x-cocoa-max-risk"] == f"{answer['usage']['completion_tokens_details']['cocoa_max_risk']:.6g}"
    )
    return answer


def risks(report: dict[str, Any]) -> list[float]:
    return [span["risk"] for span in report["spans"]]


@pytest.mark.parametrize("path", [SCORE, "/cocoa/score"])
@pytest.mark.parametrize("kind", ["text", "messages", "ids"])
async def test_a_text_is_divided_at_its_risk_points(tiny: Speaker, path: str, kind: str) -> None:
    ids = tiny.encode(PROMPT) if kind == "text" else tiny.encode_chat(HELLO)
    asked = {"text": PROMPT, "messages": HELLO, "ids": ids}[kind]
    expected = risk_report(tiny.score(ids, TEXTS[0], divide=True))
    body = {"messages" if kind == "messages" else "prompt": asked, "text": TEXTS[0]}
    answer = (await post(create_app(tiny), body, path)).json()
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    [entry] = answer["data"]
    assert (entry["object"], entry["index"], entry["text"]) == ("cocoa.score", 0, TEXTS[0])
    report = entry["cocoa_risk"]
    assert len(report["spans"]) > 1
    assert risks(report) == near(risks(expected))
    assert report["max_risk"] == near(expected["max_risk"])
    assert "".join(span["text"] for span in report["spans"]) == TEXTS[0]
    assert {span["kind"] for span in report["spans"]} == {"given"}
    assert report["check"] == expected["check"]


@pytest.mark.parametrize("divide", [False, True])
async def test_many_texts_after_one_prompt(tiny: Speaker, divide: bool) -> None:
    answer = await score(tiny, prompt=PROMPT, texts=TEXTS, divide=divide)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        alone = (await score(tiny, prompt=PROMPT, text=text, divide=divide))["data"][0]["cocoa_risk"]
        assert risks(entry["cocoa_risk"]) == near(risks(alone))
        assert (len(entry["cocoa_risk"]["spans"]) > 1) is divide
    tokens = [tiny.score(PROMPT, text).usage for text in TEXTS]
    assert answer["usage"]["prompt_tokens"] == tokens[0].prompt_tokens + sum(one.completion_tokens for one in tokens)
    assert answer["usage"]["completion_tokens"] == 0


MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (SCORE, {"prompt": PROMPT, "text": TEXTS[0]}, "source"),
        (SCORE, {"messages": MESSAGES, "text": TEXTS[0]}, "source"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}, "cocoa.source"),
    ],
)
async def test_passages_are_named(engine: CocoaEngine, path: str, body: dict[str, Any], name: str) -> None:
    def asked(source: str) -> dict[str, Any]:
        return {**body, **({"cocoa": {"source": [source]}} if name == "cocoa.source" else {"source": source})}

    answer = (await post(create_app(engine), asked("A tower is in Paris."), path)).json()
    [entry] = answer["data"] if path == SCORE else answer["choices"]
    assert all(len(span["passage_attention"]) == 1 for span in entry["cocoa_risk"]["spans"])
    error = await refusal(engine, path=path, **asked("A house"))
    assert error["param"] == name
    assert "not in the prompt" in error["message"]


async def test_settings_and_candidates_apply(tiny: Speaker) -> None:
    answer = await score(tiny, prompt=PROMPT, text=TEXTS[0], cocoa={"risk": "f_mlds", "gamma": 1.0, "candidates": True})
    report = answer["data"][0]["cocoa_risk"]
    expected = tiny.score(PROMPT, TEXTS[0], config=CocoaConfig(risk="f_mlds", gamma=1.0), divide=True)
    assert report["risk_source"] == "f_mlds"
    assert len(report["spans"]) == len(expected.spans)
    assert all("rivals" in span for span in report["spans"])


async def test_long_texts_are_read_in_steps(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": PROMPT, "text": TEXTS[0], "divide": False}
    expected = await score(tiny, **body)
    monkeypatch.setattr("cocoa_integrations.server.protocol.answers._MOST_LOGITS", 0)
    [answer], [whole] = (await score(tiny, **body))["data"], expected["data"]
    assert risks(answer["cocoa_risk"]) == near(risks(whole["cocoa_risk"]))


@pytest.mark.parametrize(("risk", "risk_source"), [("auto", "token_probability"), ("con_mlds", "con_mlds")])
async def test_what_is_served(risk: Any, risk_source: str) -> None:
    tiny = speaker(max_batch_size=3, max_queue=5)
    tiny.config = CocoaConfig(alpha=1.5, decore_heads="/secret/heads.json", risk=risk)
    app = create_app(tiny, ServerSettings(max_n=2, served_names=("a", "b"), api_keys=("secret",)))
    async with client_of(app, authorization="Bearer secret") as client:
        found = (await client.get("/v1/cocoa/info")).json()
        version = (await client.get("/version")).json()
    assert version == {"version": __version__}
    assert found["object"] == "cocoa.info"
    assert found["served_names"] == ["a", "b"]
    assert found["model"] == tiny.info().model_dump(mode="json")
    assert (found["settings"]["alpha"], found["settings"]["method"]) == (1.5, "cocoa-sig")
    assert (found["risk_source"], found["calibrator"]) == (risk_source, None)
    assert (found["limits"]["max_n"], found["limits"]["context_window"]) == (2, 4096)
    assert (found["limits"]["max_batch_size"], found["limits"]["max_queue"]) == (3, 5)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert "secret" not in str(found)
    async with client_of(app) as stranger:
        assert [(await stranger.get(path)).status_code for path in ("/v1/cocoa/info", "/version")] == [401, 401]


async def test_the_embedded_calibrator_is_named(engine: CocoaEngine) -> None:
    async with client_of(create_app(engine)) as client:
        found = (await client.get("/v1/cocoa/info")).json()
    assert found["risk_source"] == "calibrator"
    assert found["calibrator"]["model_name"] == engine.model_name
    assert found["calibrator"]["spans"] is True


class Scorer(Speaker):
    """Notes the texts of each call and how many ran at once, and waits before the first and the twentieth one."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.texts: list[Any] = []
        self.goes_on = threading.Event()
        self.running = self.most = 0

    def score(self, prompt: Any, text: Any, **options: Any) -> Any:
        if len(self.texts) == 20:
            self.goes_on.clear()
        self.texts.append(text)
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.goes_on.wait(PATIENCE)
        try:
            return super().score(prompt, text, **options)
        finally:
            self.running -= 1


@pytest.mark.slow
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("others", [1, 4])
async def test_a_new_request_waits_for_two_texts_however_many_others_there_are(
    tiny: Speaker, divide: bool, others: int
) -> None:
    """The texts, or batches of texts, of several requests take turns."""
    engine = Scorer(
        tiny.session.model.model, tiny.tokenizer, model_name="tiny", runtime=Runtime(max_batch_size=2, max_queue=20)
    )
    app = create_app(engine)
    many = {"prompt": PROMPT, "texts": [f"a{number}" for number in range(50)], "divide": divide}
    requests = [asyncio.ensure_future(post(app, many, SCORE)) for _ in range(others)]
    engine.goes_on.set()
    await happens(lambda: len(engine.texts) == 21)
    requests.append(asyncio.ensure_future(post(app, {"prompt": PROMPT, "text": "b", "divide": divide}, SCORE)))
    await happens(lambda: len(app.state.cocoa.calls) == others + 1)
    await asyncio.sleep(0.2)  # it is ready to be scored
    engine.goes_on.set()
    answers = [(await request).json()["data"] for request in requests]
    assert [[entry["text"] for entry in entries] for entries in answers] == [many["texts"]] * others + [["b"]]
    assert engine.texts.index("b") <= 22
    assert engine.most == 1


async def test_an_error_names_the_text_among_all(tiny: Speaker) -> None:
    texts = [*TEXTS * 6, "long " * 4000, "a"]
    error = await refusal(tiny, path=SCORE, prompt=PROMPT, texts=texts, divide=False)
    assert error["param"] == "text"
    assert "12" in error["message"]
