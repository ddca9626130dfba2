"""Sweeps: the points that a sweep file lists, their runs, and the table of results."""
