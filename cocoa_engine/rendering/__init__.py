"""Answers made visible: in terminals, as HTML, Markdown, SVG and plots. Each form is one module.

The forms that are text documents are registered in :mod:`~cocoa_engine.rendering.documents`. A further one is a file
here and a line there.
"""
