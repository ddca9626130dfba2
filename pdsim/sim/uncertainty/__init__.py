"""Uncertainty of a result: its range, its noise, its sensitivity to resources, and steps outside of measurements."""
