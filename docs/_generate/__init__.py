"""Generates parts of the documentation site from the code, and has the MkDocs hooks. Not part of the site."""
