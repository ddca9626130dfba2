"""Prefill instances: queues, forwards, and the states of a request."""
