"""Errors of a simulation against what was measured: published numbers, real runs, an observed load."""
