"""GGUF files: the engine on a file's own blocks beside llama.cpp on the same file. Run ``python -m benchmarks.gguf``."""
