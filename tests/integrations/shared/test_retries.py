"""The retries of both frameworks have the same options, in the same order, with the same defaults and descriptions."""

from __future__ import annotations

import inspect
import re

from cocoa_integrations.langchain import with_citations, with_risk_retry
from cocoa_integrations.llama_index import RiskCitationQueryEngine, RiskRetryQueryEngine

ONLY_LANGCHAIN = ("question", "context", "format_documents", "return_documents", "prompt", "chat", "retriever")


def options_of(function: object, leave_out: tuple[str, ...]) -> list[tuple[str, object, str]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in leave_out]
    return [(one.name, one.default, str(one.annotation)) for one in named]


def described(function: object, name: str) -> str:
    text = re.sub(r"\s+", " ", inspect.getdoc(function) or "")
    found = re.search(rf" {name}: (.*?)(?= \*{{0,2}}[a-z_]+: | Raises:)", text)
    assert found is not None
    return found[1]


def test_retries_have_the_same_options() -> None:
    here, there = (options_of(one, ONLY_LANGCHAIN) for one in (with_risk_retry, RiskRetryQueryEngine))
    by_framework = {"second_retriever"}  # the class of a retriever is the framework's
    assert [one[:2] for one in here] == [one[:2] for one in there]
    assert [one for one in here if one[0] not in by_framework] == [one for one in there if one[0] not in by_framework]
    for name in ("threshold", "max_tries", "alphas", "measure"):
        assert described(with_risk_retry, name) == described(RiskRetryQueryEngine, name)


def test_citations_have_the_same_options() -> None:
    here, there = (options_of(one, ONLY_LANGCHAIN) for one in (with_citations, RiskCitationQueryEngine))
    assert here == [one for one in there if one[0] != "context_lift"]
