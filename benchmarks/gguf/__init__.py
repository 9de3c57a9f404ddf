"""GGUF files: the engine on the blocks of a file, beside llama.cpp. Run ``python -m benchmarks.gguf``."""
