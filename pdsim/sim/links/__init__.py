"""Bytes that cross links in simulated time: KV, cached pages, forwards of several hosts."""
