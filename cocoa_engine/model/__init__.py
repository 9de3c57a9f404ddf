"""The model and its tokenizer: loading, token ids, text of tokens, hidden states."""
