"""Adapters that report per-span hallucination risk in LangChain, LlamaIndex, transformers and lm-evaluation-harness.

Import ``cocoa_integrations.langchain`` or ``cocoa_integrations.llama_index``; neither imports the other's framework.
``cocoa_integrations.transformers`` decodes inside transformers' own ``generate``.
"""
