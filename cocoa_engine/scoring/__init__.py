"""Statistics of given texts: teacher forcing, candidates they competed with, layer profiles, context lift."""
