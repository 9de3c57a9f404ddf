"""C++ kernels for a decoding step on a CPU, compiled with GCC or Clang on first use.

They run linear layers and attention, and rank next tokens. For the Llama family, one call runs all decoder layers.
"""
