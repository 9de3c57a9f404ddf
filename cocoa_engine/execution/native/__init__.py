"""Kernels of our own for a step on a CPU, built with GCC on first use.

Linear layers, attention and next tokens; and for the Llama family all decoder layers in one call.
"""
