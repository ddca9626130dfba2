"""Attention over pages of KV: append, decode, prefill."""
