"""Statistics of given texts: teacher forcing, candidate spans, layer profiles and context lift."""
