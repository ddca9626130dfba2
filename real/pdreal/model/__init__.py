"""A transformer of a Llama, Qwen3, Qwen3.5 or DeepSeek-V3 model over a paged KV cache: weights, layers and sampling."""
