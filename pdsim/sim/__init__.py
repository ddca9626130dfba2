"""Simulated mode. SimPy's event queue gives instances simulated time, and cost models give the durations of their
steps.
"""
