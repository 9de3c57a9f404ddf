"""Risk as attributes of OpenTelemetry spans.

The adapters write the risk of an answer to the OpenTelemetry span of the model call, if that span is still recording
when the answer is complete. The span is the one that an instrumentation of LangChain or LlamaIndex has started for the
run or the call (OpenInference, langchain-azure-ai, OpenLLMetry and others that store their spans in a similar way),
whether or not it is current. Without one, it is the span that is current when the answer is requested. There is nothing
to enable: ``opentelemetry-api`` (the extra ``tracing``) is enough. A process that has not imported OpenTelemetry pays
one look-up in ``sys.modules``.

==========================  ===================================================================
``cocoa.max_risk``          the highest risk of any text span of any answer
``cocoa.mean_risk``         the mean risk over the text spans of all answers
``cocoa.risk_points``       the number of risk points in all answers
``cocoa.calibrated``        whether all these risks are calibrated
``cocoa.answers``           the number of answers
==========================  ===================================================================

"All answers" are the answers requested under the same OpenTelemetry span. An instrumentation that opens one span per
model call gives one answer per span; a span around a whole chain or query engine collects every answer of the chain.
Only the innermost span is written to. Answers from a LangChain cache are not decoded and are not counted. Neither are
answers that were interrupted.
"""

from cocoa_integrations._shared.tracing import RiskTrace

__all__ = ["RiskTrace"]
