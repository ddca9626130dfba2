"""Kernels over pages of KV: append, decode attention, prefill attention."""
