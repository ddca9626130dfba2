"""Prefill instances: their queues, the forwards that they build, and the states of a request."""
