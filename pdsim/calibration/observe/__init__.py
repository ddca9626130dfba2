"""Measures a running server as one of its clients: first single probes, then a load."""
