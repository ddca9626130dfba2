"""Prefill and decode instances, router and caches: pure state machines, driven from outside."""
