"""Simulates the use of links by transfers of KV, copies of cached pages, embeddings, and activations between the hosts
of one server.
"""
