"""Requests with their hidden truth, from generators and from public traces."""
