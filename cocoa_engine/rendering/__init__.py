"""Rendering of answers: in terminals, and as HTML, Markdown, SVG and plots. Each form is one module.

Forms that are text documents are registered in :mod:`~cocoa_engine.rendering.documents`. To add one, write its module
here and add a line there.
"""
