"""Instances of all roles, router and caches, as pure state machines without clock, randomness, I/O or threads.

Simulator and real mode drive the same state machines, because a simulator with a scheduler of its own drifts from the
real one. Calls carry `now_ns` and return commands and steps. The order of calls is shared, too: `instance_loop`
(instance.py) yields a step or a `Wait`, and the driver executes it.
"""
