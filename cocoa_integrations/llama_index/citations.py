"""A wrapper around a query engine that cites, for each part of the answer, the node that it was taken from."""

from __future__ import annotations

from dataclasses import replace

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE, Response

from cocoa_engine.report import RISK_KEY
from cocoa_integrations._shared.citations import (
    CITATIONS_KEY,
    CitedBy,
    citing,
    with_markers,
)
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations.llama_index.answers import Answers
from cocoa_integrations.llama_index.query_engine import RiskQueryEngine


class RiskCitationQueryEngine(RiskQueryEngine):
    """A :class:`RiskQueryEngine` that also cites the source of each part of the answer, by measurement::

        engine = RiskCitationQueryEngine(index.as_query_engine(llm=llm))
        response = engine.query("Who built the lighthouse?")
        print(response)  # It was built by Marta Lindqvist [1].
        response.source_nodes[0]  # source 1

    The markers look like those of LlamaIndex's ``CitationQueryEngine``: ``[n]`` is the n-th of ``source_nodes``. There
    the model writes them, and may cite what it did not use. Here they are measured. By attention, the source of a part
    is the node that the model's retrieval heads attend to most while the part is written. By lift, each node is left
    out of the prompt in turn, and the answer is fed again; the source of a part is the node whose absence lowers the
    part's log p most.

    ``metadata["cocoa_citations"]`` has an entry for each citation with ``source`` (from 1), ``id`` (of the node),
    ``start``, ``end``, ``text``, ``lift`` (in nats) or ``attention``, and ``spans``. Each entry of
    ``cocoa_risk["spans"]`` has ``source``, and ``source_lifts`` or ``source_attentions``, by node. All offsets refer to
    the text with markers. A streamed response has no markers; its citations are in the metadata when the stream has
    been read to its end.

    A low lift does not mean that no node supports a part. If two nodes say the same, leaving out one of them changes
    little, and neither may be cited. A high lift shows that the text depends on the node, not that it is true.

    Cost: by attention none, unless an engine made the source nodes of others, as ``CitationQueryEngine`` does: then the
    answer is fed again. By lift one forward pass over prompt and answer for each node in the prompt, two if logits
    processors were used.

    Args:
        inner: the query engine.
        by: what finds the source of a part, ``"attention"`` or ``"lift"``. Attention needs a model whose attention can
            be seen, and the text of each node in the prompt as it is. Default: attention, and where that is not so lift
            with a model in this process (a warning is logged); lift if ``min_lift`` alone is given. Citations have
            ``attention`` or ``lift``.
        min_lift: the lowest lift of a cited part, in nats. Default: 1.
        min_attention: the lowest attention of a part on the node it cites, in [0, 1]. Default: 0.05.
        markers: whether the text of the response gets the markers, at the end of its sentences and clauses.
        context_lift: as for :class:`RiskQueryEngine`.

    Raises:
        ConfigError: as for :class:`RiskQueryEngine`, ``by`` is unknown, or a limit is not a finite number. A
            query raises it if ``by="attention"`` cannot be measured.
    """

    def __init__(
        self,
        inner: BaseQueryEngine,
        *,
        by: CitedBy | None = None,
        min_lift: float | None = None,
        min_attention: float | None = None,
        markers: bool = True,
        context_lift: bool = False,
    ) -> None:
        self._citing = citing(by, min_lift, min_attention)
        self._markers = markers
        super().__init__(inner, context_lift=context_lift)

    def _collector(self) -> Answers:
        return Answers(lift=self._context_lift, cite=self._citing)

    def _reported(self, response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE:
        return self._marked(super()._reported(response, answers))

    async def _areported(self, response: RESPONSE_TYPE, answers: Answers) -> RESPONSE_TYPE:
        return self._marked(await super()._areported(response, answers))

    def _marked(self, response: RESPONSE_TYPE) -> RESPONSE_TYPE:
        metadata = response.metadata or {}
        citations = metadata.get(CITATIONS_KEY)
        if not self._markers or citations is None or not isinstance(response, Response):
            return response
        report = metadata[RISK_KEY]
        text = EditedText.of(str(response), report)
        change = with_markers(text, text.originals(citations, text.begin), report)
        changed = {RISK_KEY: change.of_report(report), CITATIONS_KEY: change.moved(citations, text.begin)}
        return replace(response, response=change.text, metadata={**metadata, **changed})
