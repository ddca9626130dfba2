"""Measures times of this machine, as rows for `pdsim calibrate`."""
