"""Simulated against measured, in three rooms: fit, observe, validate."""
