"""What moves over links in simulated time: KV of transfers, copies of cached pages, embeddings, and activations between
the hosts of one server.
"""
