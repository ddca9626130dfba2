"""A transformer of the Llama family over a paged KV cache."""
