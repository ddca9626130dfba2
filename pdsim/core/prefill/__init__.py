"""A prefill instance: its queues, the forwards that it builds, and its life of a request."""
