"""Simulated against measured: cases with published numbers, and the errors of every metric."""
