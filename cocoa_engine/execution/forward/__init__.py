"""Forward passes over packed tokens of several sequences."""
