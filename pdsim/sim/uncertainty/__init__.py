"""Uncertainty of a result: ends of its range, noise, sensitivity, steps outside of all measurements."""
