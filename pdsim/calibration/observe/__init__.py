"""Measures a running server as a client: probes, then a load."""
