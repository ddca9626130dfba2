"""Copies of KV: gather into staging, scatter out of it, push from pool to pool."""
