"""Kernels of our own for a step on a CPU: linear layers, attention and next tokens, built with GCC on first use."""
