"""Sweeps: points of a grid, their runs, and the table of results."""
