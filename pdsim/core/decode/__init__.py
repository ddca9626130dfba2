"""Decode instances: the queue for pages, the batch, and the states of a request."""
