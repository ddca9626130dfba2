"""Image encoders on GPUs of their own: instances, the embeddings that they send, and the servers that wait."""
