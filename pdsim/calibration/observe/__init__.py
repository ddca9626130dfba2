"""Measures a running server as one of its clients: first with probes of one or several requests, then under load."""
