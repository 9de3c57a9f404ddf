"""Kernels of our own for a decoding step on a CPU: linear layers and attention, built with GCC on first use."""
