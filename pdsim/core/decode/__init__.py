"""Decode instances: their queue for pages, their batch, and the states of a request."""
