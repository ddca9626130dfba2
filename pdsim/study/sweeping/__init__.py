"""Sweeps: the points that a sweep file describes, the runs of these points, and the results of the runs."""
