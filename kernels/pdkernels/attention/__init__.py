"""Kernels that append KV to pages, and attention: decode over pages, prefill over pages or packed keys and values."""
