"""What decides: prefill and decode instances, router, caches. Pure state machines, driven from outside."""
