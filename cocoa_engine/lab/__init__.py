"""Measurements over many prompts: the signal study, fitting calibrators, alpha, retrieval heads and timing."""
