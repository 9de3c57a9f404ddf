"""Ways to run packed tokens of several sequences through a model in one forward pass."""
