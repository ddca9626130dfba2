"""Encoders on GPUs of their own: their instances, the embeddings that they send, and the servers that wait for
embeddings.
"""
