"""The model and its tokenizer: loading, tokenization, incremental detokenization, hidden states."""
