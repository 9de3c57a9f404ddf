"""Engines that change the text of a response, one around the other: the offsets of its report follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import QueryBundle
from pydantic import PrivateAttr

from cocoa_engine import Generation
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations._shared.edits import replacement
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations.llama_index import RiskChatEngine, RiskCitationQueryEngine, RiskQueryEngine, answers, get_risk
from cocoa_integrations.llama_index.callbacks import Observers
from tests.helpers.edited_answers import (
    MARKS,
    REDACTED,
    SPANS,
    VALUES,
    assert_nested,
    assert_offsets_follow,
    redact,
    squeezed,
)
from tests.helpers.llama_index_helpers import Finds
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import to_dicts

TEXTS = ("first", "second", "third")


class Told(CustomLLM):
    """Gives made-up answers, and reports them as ``CocoaLLM`` does."""

    _answers: list[Generation] = PrivateAttr()

    def __init__(self, told: Sequence[Generation]) -> None:
        super().__init__()
        self._answers = list(told)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        told: Any = SimpleNamespace(report=RiskReport.of(answer), generation=answer)
        Observers(lambda edit=None: pytest.fail("no prompt is repeated")).answer_complete(told)
        return CompletionResponse(text=answer.text)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        raise NotImplementedError


class Changing(BaseQueryEngine):
    """An engine that marks or replaces a response as ``RiskRetryQueryEngine`` does after its tries."""

    def __init__(self, inner: BaseQueryEngine, change: Callable[[str, RiskReport], Any]) -> None:
        super().__init__(CallbackManager())
        self._inner, self._change = inner, change

    def _get_prompt_modules(self) -> Any:
        return {"inner": self._inner}

    def _query(self, query_bundle: QueryBundle) -> Response:
        response: Any = self._inner.query(query_bundle)
        if response.metadata["cocoa_risk"] is None:
            return response
        report = get_risk(response)
        change = self._change(str(response), report)
        metadata = {**response.metadata, "cocoa_risk": change.of_report(report).to_dict()}
        if "cocoa_citations" in metadata:
            citations = [Citation.from_wire(citation) for citation in metadata["cocoa_citations"]]
            metadata["cocoa_citations"] = to_dicts(change.moved(citations))
        return Response(response=change.text, source_nodes=response.source_nodes, metadata=metadata)

    async def _aquery(self, query_bundle: QueryBundle) -> Response:
        return self._query(query_bundle)


def marking(mark: Any, threshold: float) -> Callable[[BaseQueryEngine], BaseQueryEngine]:
    return lambda inner: Changing(inner, lambda text, report: Limit(threshold).with_marks(text, report, mark))


STEPS: dict[str, Callable[[BaseQueryEngine], BaseQueryEngine]] = {
    "report": RiskQueryEngine,
    "cite": lambda inner: RiskCitationQueryEngine(inner, min_lift=1.0),
    "mark": marking(MARKS[0], 0.3),
    "mark more": marking(MARKS[1], 0.5),
    "redact": marking(redact, 0.8),
    "abstain": lambda inner: Changing(inner, lambda text, report: replacement(report, 2 * REDACTED)),
}
MODES = [ResponseMode.COMPACT, ResponseMode.ACCUMULATE, ResponseMode.SIMPLE_SUMMARIZE]


def built(inner: BaseQueryEngine, steps: Sequence[str]) -> BaseQueryEngine:
    engine: BaseQueryEngine = RiskQueryEngine(inner)
    for step in steps:
        engine = STEPS[step](engine)
    return engine


def asked(mode: ResponseMode, spans: Sequence[Any], steps: Sequence[str], *, strip: bool) -> Any:
    told = [generation(*of_one) for of_one in spans]
    inner: BaseQueryEngine = RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=Told(told), response_mode=mode)
    if strip:
        inner = Stripping(inner)
    return built(inner, steps).query("Who?")


class Stripping(Changing):
    """An engine of LlamaIndex that takes off white space."""

    def __init__(self, inner: BaseQueryEngine) -> None:
        super().__init__(inner, lambda text, report: None)

    def _query(self, query_bundle: QueryBundle) -> Response:
        response: Any = self._inner.query(query_bundle)
        return Response(response=str(response.response).strip(), source_nodes=response.source_nodes, metadata={})


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(MODES),
    st.lists(SPANS, min_size=1, max_size=3),
    VALUES,
    st.lists(st.sampled_from(list(STEPS)), max_size=4),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore::cocoa_integrations.llama_index.MissingRiskWarning")
def test_offsets_follow_any_engines(mode: Any, spans: Any, values: Any, steps: Any, strip: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_lift_by_node", lambda part, nodes: [values[number] for number in part.numbers])
        plain = asked(mode, spans, [], strip=strip)
        response = asked(mode, spans, steps, strip=strip)
    report, before = response.metadata["cocoa_risk"], plain.metadata["cocoa_risk"]
    if report is None or before is None:
        assert report == before
        return
    text = str(response)
    assert_offsets_follow(text, report["spans"])
    for key in ("claims", "sentences", "parts"):
        assert_offsets_follow(text, report.get(key, []))
    assert_offsets_follow(text, report.get("check", []), ordered=False)
    citations = response.metadata.get("cocoa_citations", [])
    assert_offsets_follow(text, citations)
    assert [span["text"] for span in report["spans"]] == [span["text"] for span in before["spans"]]
    assert [span["risk"] for span in report["spans"]] == [span["risk"] for span in before["spans"]]
    if not {"redact", "abstain"} & set(steps):
        assert squeezed(text) == "".join(str(plain).split())
        assert_nested(text)
        for part, own in zip(report.get("parts", []), before.get("parts", []), strict=True):
            shown, of_answer = text[part["start"] : part["end"]], str(plain)[own["start"] : own["end"]]
            assert squeezed(shown) == "".join(of_answer.split())


@pytest.mark.parametrize("steps", [[], ["cite"], ["mark"], ["mark", "cite"], ["cite", "mark", "abstain"]])
@pytest.mark.parametrize("how", ["chat", "achat"])
@pytest.mark.filterwarnings("error::cocoa_integrations.llama_index.MissingRiskWarning")
async def test_a_chat_keeps_what_engines_inside_it_wrote(
    how: str, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_lift_by_node", lambda part, nodes: [[None], [None], [2.0], [None]])
    told = generation(("The tower", 0.1), (" is", 0.2), (" old", 0.9), (".", 0.1))
    inner = built(RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=Told([told])), steps)
    chat = RiskChatEngine(CondenseQuestionChatEngine.from_defaults(query_engine=inner, llm=MockLLM()))
    response: Any = await chat.achat("Who?") if how == "achat" else await asyncio.to_thread(chat.chat, "Who?")
    expected = response.sources[0].raw_output.metadata
    for key in ("spans", "claims", "edits"):
        assert response.metadata["cocoa_risk"].get(key) == expected["cocoa_risk"].get(key)
    assert response.metadata.get("cocoa_citations") == expected.get("cocoa_citations")
    assert_offsets_follow(response.response, response.metadata["cocoa_risk"]["spans"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SPANS.filter(lambda spans: any(text.strip() for text, _ in spans)), min_size=3, max_size=3),
    VALUES,
    st.lists(st.sampled_from(["cite", "mark", "mark more", "redact", "report"]), max_size=3),
)
@pytest.mark.filterwarnings("ignore::cocoa_integrations.llama_index.MissingRiskWarning")
def test_answers_in_one_text_change_as_they_do_alone(spans: Any, values: Any, steps: Any) -> None:
    """No marker of an answer stands in another one, or behind what separates them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_lift_by_node", lambda part, nodes: [values[number] for number in part.numbers])
        together = asked(ResponseMode.ACCUMULATE, spans, steps, strip=False)
        alone = [asked(ResponseMode.COMPACT, [of_one], steps, strip=False) for of_one in spans]
    if together.metadata["cocoa_risk"] is None or any(one.metadata["cocoa_risk"] is None for one in alone):
        return
    shown = [f"Response {number}: {response}" for number, response in enumerate(alone, 1)]
    assert str(together) == "\n---------------------\n".join(shown)
