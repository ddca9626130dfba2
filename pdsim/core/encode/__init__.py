"""Encoding of images and audio clips: instances on GPUs of their own, the embeddings that they send, servers that wait
for embeddings, and servers that encode items themselves.
"""
