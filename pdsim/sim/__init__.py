"""Simulated mode: SimPy's event queue drives the scheduler in simulated time, and cost models give the durations."""
