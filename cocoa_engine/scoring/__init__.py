"""Statistics of given texts: teacher forcing, candidate spans and layer profiles."""
