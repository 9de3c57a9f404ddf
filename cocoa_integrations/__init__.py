"""Adapters that carry per-span hallucination risk into the frameworks people build with.

``cocoa_integrations.langchain`` and ``cocoa_integrations.llama_index`` are imported on their own: neither imports the
other's framework. ``cocoa_integrations.transformers`` decodes inside transformers' own ``generate``.
"""
