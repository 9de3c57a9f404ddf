"""What measures over many prompts: signal study, fitting of calibrators, alpha, retrieval heads, timing."""
