"""Prefill and decode instances, router and caches, as pure state machines without clock or I/O."""
